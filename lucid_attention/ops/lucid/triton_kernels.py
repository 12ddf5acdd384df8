"""Kernels of the LUCID solve.

Everything is padded: n heads of P positions, those of the past first and right-aligned, so that the new ones start at
a multiple of a chunk. Keys lie as [n, P, D'], values as [n, P, E'], D' and E' padded as well, so only the kernels at
the border (`pack_*`, `solve_kernel` where it writes results) need masks. Padding and masked positions have zero keys,
zero values and weight 0: they take no part.

    z = v − s L y,   y = w ∘ z,   L_ij = exp(c (cos θ_ij − 1)) for j < i in the same document

w is β, or 1, and 0 at masked positions. `documents` [2, P] has, for packed documents, where the document of a position
starts and where it ends. A chunk is a pair of blocks; `chunks` holds, for each, the inverse of its
diagonal block of I + s L diag(w) (of I + s diag(w) L for the adjoint): made for all chunks at once, by forward
substitution.
"""

import triton
import triton.language as tl

from ..triton_tiles import exponentials, key_columns, key_rows, score_tile

PACKING = ["H", "stride_b", "stride_h", "stride_t", "stride_mask", "length", "offset", "first", "tiles", "P"]


@triton.jit(do_not_specialize=PACKING, do_not_specialize_on_alignment=["mask"])
def pack_keys_kernel(
    k,
    mask,
    keys,
    rnorm,
    inverse,
    H,
    stride_b,
    stride_h,
    stride_t,
    stride_mask,
    length,
    offset,
    first,
    tiles,
    P,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Copy keys, each scaled by a power of two to a largest entry of 256 to 511, so that products neither overflow nor
    vanish; rnorm: 1/‖·‖ of the scaled key, inverse: 1/‖·‖ of the key itself. Both are 0 for a zero key.

    Padded rows [first, first + tiles · ROWS); row r is position r − offset of `length`.
    """
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * ROWS + tl.arange(0, ROWS)
    positions = rows - offset
    inside = (positions >= 0) & (positions < length)
    if MASKED:
        inside &= tl.load(mask + (head // H) * stride_mask + positions, mask=inside, other=0) != 0
    columns = tl.arange(0, FEATURES)
    where = inside[:, None] & (columns < D)[None, :]
    start = k + (head // H) * stride_b + (head % H) * stride_h
    x = tl.load(start + positions.to(tl.int64)[:, None] * stride_t + columns[None, :], mask=where, other=0.0)
    x = x.to(tl.float32)
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 255
    scale = (tl.minimum(tl.maximum(262 - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    # Below the smallest normal number a key counts as zero, as in the other implementations.
    scaled = tl.where((exponent > 0)[:, None], x * scale[:, None], 0.0)
    # The error of a norm is that of a whole row and column of P: it is made in float64, and rounded once.
    wide = scaled.to(tl.float64)
    squares = tl.sum(wide * wide, 1)
    reciprocal = tl.where(squares > 0, 1.0 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)
    # NaN must not turn into a zero key.
    reciprocal = tl.where(squares == squares, reciprocal, squares).to(tl.float32)
    here = head * P + rows
    tl.store(keys + here[:, None] * FEATURES + columns[None, :], scaled.to(keys.dtype.element_ty))
    tl.store(rnorm + here, reciprocal)
    tl.store(inverse + here, reciprocal * scale)


@triton.jit(do_not_specialize=PACKING, do_not_specialize_on_alignment=["mask"])
def pack_values_kernel(
    v,
    mask,
    values,
    H,
    stride_b,
    stride_h,
    stride_t,
    stride_mask,
    length,
    offset,
    first,
    tiles,
    P,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Copy values; zeros at padding and masked positions."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * ROWS + tl.arange(0, ROWS)
    positions = rows - offset
    inside = (positions >= 0) & (positions < length)
    if MASKED:
        inside &= tl.load(mask + (head // H) * stride_mask + positions, mask=inside, other=0) != 0
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    where = inside[:, None] & (columns < E)[None, :]
    start = v + (head // H) * stride_b + (head % H) * stride_h
    x = tl.load(start + positions.to(tl.int64)[:, None] * stride_t + columns[None, :], mask=where, other=0.0)
    out = values + (head * P + rows)[:, None] * VALUES + columns[None, :]
    tl.store(out, x.to(values.dtype.element_ty))


@triton.jit
def system_tile(
    keys,
    rnorm,
    documents,
    base,
    first_row,
    first_column,
    sharpness,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """exp(c (cos θ − 1)) between two ranges of positions of a head, zero between documents: [ROWS, COLUMNS].

    base: the head's first row in `keys`, int64.
    """
    scores = score_tile(
        keys, base + first_row, keys, base + first_column, ROWS, COLUMNS, FEATURES, PIECE, PRECISION, False
    )
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    scores *= tl.load(rnorm + base + first_row + rows)[:, None]
    scores *= tl.load(rnorm + base + first_column + columns)[None, :]
    tile = exponentials(scores, sharpness)
    if PACKED:
        same = tl.load(documents + first_row + rows)[:, None] == tl.load(documents + first_column + columns)[None, :]
        tile = tl.where(same, tile, 0.0)
    return tile


@triton.jit(do_not_specialize=["first", "tiles", "P"])
def inverse_kernel(
    keys,
    rnorm,
    weights,
    documents,
    sharpness,
    chunks,
    strength,
    first,
    tiles,
    P,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADJOINT: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The inverses of all diagonal blocks, by forward substitution: the diagonal blocks of `chunks`."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    block = pid % tiles
    start = first + block * BLOCK
    base = head * P
    c = tl.load(sharpness + head)
    # L is made of a symmetric matrix: this is its transpose, whose column i is row i of L, without a transposition.
    upper = system_tile(keys, rnorm, documents, base, start, start, c, BLOCK, BLOCK, FEATURES, PIECE, PACKED, PRECISION)
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weights + base + start + tl.arange(0, BLOCK)) * strength
    upper *= w[None, :] if ADJOINT else w[:, None]
    upper = tl.where(rows < columns, upper, 0.0)
    x = tl.where(rows == columns, 1.0, 0.0)
    for i in range(1, BLOCK):
        row = tl.sum(tl.where(columns == i, upper, 0.0), 1)
        x -= tl.where(rows == i, tl.sum(row[:, None] * x, 0)[None, :], 0.0)
    out = chunks + (head * tiles + block) * (2 * BLOCK * BLOCK) + (block % 2) * BLOCK
    tl.store(out + rows * (2 * BLOCK) + columns, x)


@triton.jit(do_not_specialize=["first", "tiles", "P"])
def merge_kernel(
    keys,
    rnorm,
    weights,
    documents,
    sharpness,
    chunks,
    strength,
    first,
    tiles,
    P,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADJOINT: tl.constexpr,
    PACKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """The lower left block of the inverse of every chunk, −X₁ A₁₀ X₀."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    start = first + (pid % tiles) * (2 * BLOCK)
    base = head * P
    rows = tl.arange(0, BLOCK)[:, None]
    inner = tl.arange(0, BLOCK)[None, :]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    c = tl.load(sharpness + head)
    tile = system_tile(
        keys, rnorm, documents, base, start + BLOCK, start, c, BLOCK, BLOCK, FEATURES, PIECE, PACKED, PRECISION
    )
    if ADJOINT:
        tile *= (tl.load(weights + base + start + BLOCK + tl.arange(0, BLOCK)) * strength)[:, None]
    else:
        tile *= (tl.load(weights + base + start + tl.arange(0, BLOCK)) * strength)[None, :]
    chunk = chunks + (head * tiles + pid % tiles) * (4 * BLOCK * BLOCK)
    upper = tl.load(chunk + rows * (2 * BLOCK) + columns)
    lower = tl.load(chunk + (rows + BLOCK) * (2 * BLOCK) + inner + BLOCK)
    right = tl.dot(tile, upper, input_precision=INVERSE)
    corner = tl.dot(lower, right, input_precision=INVERSE)
    tl.store(chunk + (rows + BLOCK) * (2 * BLOCK) + columns, -corner)


@triton.jit(do_not_specialize=["chunk", "chunk_count", "first", "length", "P"])
def solve_kernel(
    chunks,
    residuals,
    weights,
    solved,
    out,
    z,
    products,
    chunk,
    chunk_count,
    first,
    length,
    P,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ADJOINT: tl.constexpr,
    BETA: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Solve a chunk whose residuals are complete: solved = w ∘ z with z = X · residuals (Xᵀ for the adjoint).

    Written twice: to `solved` [n, P, E'] for later updates, and to `out` [n, T, E]. With BETA z is written as well; the
    adjoint, whose z is the gradient t of the right-hand side, reads z and writes t·z of every row and piece of E.
    """
    pid = tl.program_id(0)
    head = (pid // 2).to(tl.int64)
    half = pid % 2
    rows = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    matrix = chunks + (head * chunk_count + chunk) * (4 * BLOCK * BLOCK)
    start = first + chunk * (2 * BLOCK)
    base = head * P + start
    acc = tl.zeros((BLOCK, COLUMNS), tl.float32)
    low = half * BLOCK if ADJOINT else 0
    high = 2 * BLOCK if ADJOINT else (half + 1) * BLOCK
    for i in range(low, high, INNER):
        if ADJOINT:
            x = tl.load(matrix + (half * BLOCK + rows)[:, None] + (i + inner)[None, :] * (2 * BLOCK))
        else:
            x = tl.load(matrix + (half * BLOCK + rows)[:, None] * (2 * BLOCK) + (i + inner)[None, :])
        y = tl.load(residuals + (base + i + inner)[:, None] * VALUES + columns[None, :])
        acc = tl.dot(x, y, acc, input_precision=INVERSE)
    here = base + half * BLOCK + rows
    y = acc * tl.load(weights + here)[:, None]
    tl.store(solved + here[:, None] * VALUES + columns[None, :], y)
    position = chunk * (2 * BLOCK) + half * BLOCK + rows
    inside = (position < length)[:, None] & (columns < E)[None, :]
    there = (head * length + position)[:, None] * E + columns[None, :]
    tl.store(out + there, y.to(out.dtype.element_ty), mask=inside)
    if BETA:
        if ADJOINT:
            product = tl.sum(acc * tl.load(z + there, mask=inside, other=0.0).to(tl.float32), 1)
            piece = (head * tl.num_programs(1) + tl.program_id(1)) * length + position
            tl.store(products + piece, product, mask=position < length)
        else:
            tl.store(z + there, acc.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "tiles", "source", "source_end", "P"])
def update_kernel(
    keys,
    rnorm,
    documents,
    sharpness,
    solved,
    residuals,
    strength,
    first,
    tiles,
    source,
    source_end,
    P,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """residuals[target] −= s L[target, source] · solved[source], for all targets in tiles of ROWS.

    They lie behind the source or, for the adjoint, before it: what L is made of is symmetric.
    """
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    target = first + (pid % tiles) * ROWS
    base = head * P
    if PACKED:
        # A document's columns end, or begin, where it does.
        if target >= source_end:
            source = tl.maximum(source, tl.load(documents + target) // COLUMNS * COLUMNS)
        else:
            source_end = tl.minimum(source_end, tl.load(documents + P + target + ROWS - 1))
    if source < source_end:
        c = tl.load(sharpness + head)
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        wide = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        row_norms = tl.load(rnorm + base + target + rows)[:, None]
        if PIECE == FEATURES:
            row_keys = key_rows(keys, base + target, FEATURES, 0, ROWS, FEATURES)
        if PACKED:
            row_documents = tl.load(documents + target + rows)[:, None]
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        for j in range(source, source_end, COLUMNS):
            if PIECE == FEATURES:
                column_keys = key_columns(keys, base + j, FEATURES, 0, COLUMNS, FEATURES)
                scores = tl.dot(row_keys, column_keys, input_precision=PRECISION)
            else:
                scores = score_tile(
                    keys, base + target, keys, base + j, ROWS, COLUMNS, FEATURES, PIECE, PRECISION, False
                )
            scores *= row_norms * tl.load(rnorm + base + j + columns)[None, :]
            tile = exponentials(scores, c)
            if PACKED:
                tile = tl.where(row_documents == tl.load(documents + j + columns)[None, :], tile, 0.0)
            y = tl.load(solved + (base + j + columns)[:, None] * VALUES + wide[None, :])
            acc = tl.dot(tile, y, acc, input_precision=PRODUCT)
        here = residuals + (base + target + rows)[:, None] * VALUES + wide[None, :]
        tl.store(here, tl.load(here) - strength * acc)
