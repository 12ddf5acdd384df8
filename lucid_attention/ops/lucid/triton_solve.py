"""The LUCID solve and its gradients by Triton kernels: tile sizes, kernels, then their launches.

Forward: pack, invert all diagonal blocks, then right-looking: solve a chunk, update the rest of its strip; once a strip
is solved, update all later rows in parallel. Backward: the same in reverse order for dv, then one pass for the keys.
The launches depend on shapes only, never on data, and no program waits for another. Nothing T × T is in memory.

Everything is padded: n heads of P positions, those of the past first and right-aligned, so that the new ones start at
a multiple of a chunk. Keys are [n, P, D'], values [n, P, E'], D' and E' padded as well, so only the kernels at the
border (`pack_*`, `solve_kernel` where it writes results) need masks. Padding and masked positions have zero keys, zero
values and weight 0: they take no part.

    z = v − s L y,   y = w ∘ z,   L_ij = exp(c (cos θ_ij − 1)) for j < i in the same document

w is β, or 1, and 0 at masked positions. A chunk is a pair of blocks; `chunks` holds, for each, the inverse of its
diagonal block of I + s L diag(w) (of I + s diag(w) L for the adjoint): computed for all chunks at once, by forward
substitution.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import packing
from ..triton_tiles import (
    Precisions,
    Tile,
    architecture,
    exponentials,
    key_columns,
    key_rows,
    on_device,
    padded_size,
    precisions,
    registers,
    score_tile,
    unit_inverse,
)
from .system import Gradients, System

PACK_ROWS = 16


@dataclass(frozen=True)
class SolveTiles:
    """block: rows of a diagonal block; a chunk, two blocks, is solved by one launch; strip: rows whose solution is
    taken to all later rows at once."""

    inverse: Tile
    merge: Tile
    solve: Tile
    update: Tile
    gradient: Tile
    block: int = 64
    strip: int = 512

    @property
    def chunk(self) -> int:
        return 2 * self.block


# Rows of a tile and piece of the head size of the gradients of bfloat16 keys: the largest that spill nothing. 64 rows
# are what the matrix instructions of sm_90 and sm_100 need.
GRADIENT = {"sm_80": (32, 128), "sm_90": (64, 64), "sm_100": (64, 64), "gfx942": (64, 128)}
# The piece of the values in flight there: 32, or what packed documents need to spill nothing (float16 everywhere).
GRADIENT_VALUES = {"sm_90": 16}


def solve_tiles(architecture: str, dtype: torch.dtype, features: int, values: int) -> SolveTiles:
    """One configuration per architecture and shape class. Each compiles without spills (`make test-gpu-offline`).

    dtype: the wider one of keys and values; features, values: the padded head sizes.
    """
    width = min(128, values)
    whole = 32 if dtype == torch.float32 else features
    rows, out = GRADIENT.get(architecture, (32, 64))
    piece = 16 if dtype == torch.float16 else GRADIENT_VALUES.get(architecture, 32)
    # Whole keys leave less room for values; only here it is too little.
    narrow = architecture == "sm_120" and whole >= 128
    if dtype != torch.bfloat16:
        rows, out = 32, 64 if features <= 128 else 32
    return SolveTiles(
        inverse=Tile(64, 64, width, 32, warps=8 if architecture == "sm_100" else 4),
        merge=Tile(64, 16, width, min(whole, 64)),
        solve=Tile(64, 32, min(32, values), 0),
        update=Tile(64, 32, min(64, width) if narrow else width, whole),
        gradient=Tile(rows, 32, min(piece, values), min(whole, 64), out=out),
    )


class PaddedSystem(NamedTuple):
    """A padded system, as kernels read it. Contiguous.

    keys: [n, P, D'], each scaled by a power of two; rnorm, inverse: [n, P], 1/‖·‖ of the scaled key and of the key
    itself; weights: [n, P], w; documents: [2, P], where the document of a position starts and ends, empty without
    packed documents; sharpness: [n], c; strength: s.
    """

    keys: Tensor
    rnorm: Tensor
    inverse: Tensor
    weights: Tensor
    documents: Tensor
    sharpness: Tensor
    strength: float


class Constants(NamedTuple):
    """What a kernel is compiled for. Fields that a kernel does not read keep their default.

    FEATURES, VALUES: D' and E'. PIECE: of D', multiplied at a time; WIDTH: of E', likewise; OUT: of D', written by one
    program. PACKED: whether there are documents. PRECISION, PRODUCT, GRADIENT, INVERSE: `Precisions`.
    """

    FEATURES: int = 0
    PIECE: int = 0
    OUT: int = 0
    VALUES: int = 0
    WIDTH: int = 0
    ROWS: int = 0
    COLUMNS: int = 0
    BLOCK: int = 0
    ADJOINT: bool = False
    BETA: bool = False
    PACKED: bool = False
    PRECISION: str = ""
    PRODUCT: str = ""
    GRADIENT: str = ""
    INVERSE: str = ""


@triton.jit
def read_source(x, mask, strides, length, H, head, positions, columns, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Positions and columns of a head of x: [B, H, length, SIZE], zero outside and where the mask is 0.

    strides: of batch, heads and positions in x, and of the batch in the mask.
    """
    batch = head // H
    inside = (positions >= 0) & (positions < length)
    if MASKED:
        inside &= tl.load(mask + batch * strides[3] + positions, mask=inside, other=0) != 0
    start = x + batch * strides[0] + (head % H) * strides[1]
    there = start + positions.to(tl.int64)[:, None] * strides[2] + columns[None, :]
    return tl.load(there, mask=inside[:, None] & (columns < SIZE)[None, :], other=0.0)


SOURCE = ["H", "stride_b", "stride_h", "stride_t", "stride_mask", "length", "offset", "first", "tiles", "P"]


@triton.jit(do_not_specialize=SOURCE, do_not_specialize_on_alignment=["mask"])
def pack_keys_kernel(
    k, mask, keys, rnorm, inverse, H, stride_b, stride_h, stride_t, stride_mask, length, offset, first, tiles, P,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Copy keys, each scaled by a power of two to a largest entry of 256 to 511, so that products neither overflow nor
    vanish; rnorm: 1/‖·‖ of the scaled key, inverse: 1/‖·‖ of the key itself. Both are 0 for a zero key.

    Padded rows [first, first + tiles · ROWS); row r is position r − offset of `length`.
    """
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    strides = (stride_b, stride_h, stride_t, stride_mask)
    x = read_source(k, mask, strides, length, H, head, rows - offset, columns, SIZE, MASKED).to(tl.float32)
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 255
    scale = (tl.minimum(tl.maximum(262 - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    # Below the smallest normal number a key counts as zero, as in the other implementations.
    scaled = tl.where((exponent > 0)[:, None], x * scale[:, None], 0.0)
    # The error of a norm is that of a whole row and column of P: it is computed in float64, and rounded once.
    wide = scaled.to(tl.float64)
    squares = tl.sum(wide * wide, 1)
    reciprocal = tl.where(squares > 0, 1.0 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)
    # NaN must not turn into a zero key.
    reciprocal = tl.where(squares == squares, reciprocal, squares).to(tl.float32)
    here = head * P + rows
    tl.store(keys + here[:, None] * PADDED + columns[None, :], scaled.to(keys.dtype.element_ty))
    tl.store(rnorm + here, reciprocal)
    tl.store(inverse + here, reciprocal * scale)


@triton.jit(do_not_specialize=SOURCE, do_not_specialize_on_alignment=["mask"])
def pack_values_kernel(
    v, mask, values, H, stride_b, stride_h, stride_t, stride_mask, length, offset, first, tiles, P,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Copy values; zeros at padding and masked positions. Rows as in `pack_keys_kernel`."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    strides = (stride_b, stride_h, stride_t, stride_mask)
    x = read_source(v, mask, strides, length, H, head, rows - offset, columns, SIZE, MASKED)
    out = values + (head * P + rows)[:, None] * PADDED + columns[None, :]
    tl.store(out, x.to(values.dtype.element_ty))


@triton.jit
def cosine_tile(system, base, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONST: tl.constexpr):
    """cos θ between ROWS positions from `row` and COLUMNS positions from `column` of a head: [ROWS, COLUMNS].

    base: the head's first row in `keys`, int64.
    """
    cosines = score_tile(
        system.keys, base + row, system.keys, base + column, ROWS, COLUMNS, CONST.FEATURES, CONST.PIECE,
        CONST.PRECISION, False,
    )  # fmt: skip
    left = tl.load(system.rnorm + base + row + tl.arange(0, ROWS))
    right = tl.load(system.rnorm + base + column + tl.arange(0, COLUMNS))
    return cosines * left[:, None] * right[None, :]


@triton.jit
def same_document(system, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left = tl.load(system.documents + row + tl.arange(0, ROWS))
    return left[:, None] == tl.load(system.documents + column + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def system_block(system, base, row, column, sharpness, CONST: tl.constexpr):
    """A tile of L without its mask: exp(c (cos θ − 1)), zero between documents: [BLOCK, BLOCK]."""
    BLOCK: tl.constexpr = CONST.BLOCK
    tile = exponentials(cosine_tile(system, base, row, column, BLOCK, BLOCK, CONST), sharpness)
    if CONST.PACKED:
        tile = tl.where(same_document(system, row, column, BLOCK, BLOCK), tile, 0.0)
    return tile


@triton.jit(do_not_specialize=["first", "tiles", "P"])
def inverse_kernel(system, chunks, first, tiles, P, CONST: tl.constexpr):
    """The inverses of all diagonal blocks, by forward substitution: the diagonal blocks of `chunks`."""
    BLOCK: tl.constexpr = CONST.BLOCK
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    block = pid % tiles
    start = first + block * BLOCK
    base = head * P
    # L is made of a symmetric matrix: this is its transpose, whose column i is row i of L, without a transposition.
    upper = system_block(system, base, start, start, tl.load(system.sharpness + head), CONST)
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(system.weights + base + start + tl.arange(0, BLOCK)) * system.strength
    upper *= w[None, :] if CONST.ADJOINT else w[:, None]
    x = unit_inverse(tl.where(rows < columns, upper, 0.0), BLOCK)
    out = chunks + (head * tiles + block) * (2 * BLOCK * BLOCK) + (block % 2) * BLOCK
    tl.store(out + rows * (2 * BLOCK) + columns, x)


@triton.jit(do_not_specialize=["first", "tiles", "P"])
def merge_kernel(system, chunks, first, tiles, P, CONST: tl.constexpr):
    """The lower left block of the inverse of every chunk, −X₁ A₁₀ X₀."""
    BLOCK: tl.constexpr = CONST.BLOCK
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    start = first + (pid % tiles) * (2 * BLOCK)
    base = head * P
    rows = tl.arange(0, BLOCK)[:, None]
    inner = tl.arange(0, BLOCK)[None, :]
    columns = tl.program_id(1) * CONST.COLUMNS + tl.arange(0, CONST.COLUMNS)[None, :]
    tile = system_block(system, base, start + BLOCK, start, tl.load(system.sharpness + head), CONST)
    w = system.weights + base + start + tl.arange(0, BLOCK)
    if CONST.ADJOINT:
        tile *= (tl.load(w + BLOCK) * system.strength)[:, None]
    else:
        tile *= (tl.load(w) * system.strength)[None, :]
    chunk = chunks + (head * tiles + pid % tiles) * (4 * BLOCK * BLOCK)
    upper = tl.load(chunk + rows * (2 * BLOCK) + columns)
    lower = tl.load(chunk + (rows + BLOCK) * (2 * BLOCK) + inner + BLOCK)
    right = tl.dot(tile, upper, input_precision=CONST.INVERSE)
    corner = tl.dot(lower, right, input_precision=CONST.INVERSE)
    tl.store(chunk + (rows + BLOCK) * (2 * BLOCK) + columns, -corner)


@triton.jit(do_not_specialize=["chunk", "chunk_count", "first", "length", "P"])
def solve_kernel(
    weights, chunks, residuals, solved, out, z, products, chunk, chunk_count, first, length, P, E: tl.constexpr,
    CONST: tl.constexpr,
):  # fmt: skip
    """Solve a chunk whose residuals are complete: solved = w ∘ z with z = X · residuals (Xᵀ for the adjoint).

    Written twice: to `solved` [n, P, E'] for later updates, and to `out` [n, T, E]. With BETA z is written as well; the
    adjoint, whose z is the gradient t of the right-hand side, reads z and writes t·z of every row and piece of E.
    """
    BLOCK: tl.constexpr = CONST.BLOCK
    pid = tl.program_id(0)
    head = (pid // 2).to(tl.int64)
    half = pid % 2
    rows = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    inner = tl.arange(0, CONST.COLUMNS)
    matrix = chunks + (head * chunk_count + chunk) * (4 * BLOCK * BLOCK)
    base = head * P + first + chunk * (2 * BLOCK)
    acc = tl.zeros((BLOCK, CONST.WIDTH), tl.float32)
    low = half * BLOCK if CONST.ADJOINT else 0
    high = 2 * BLOCK if CONST.ADJOINT else (half + 1) * BLOCK
    for i in range(low, high, CONST.COLUMNS):
        if CONST.ADJOINT:
            x = tl.load(matrix + (half * BLOCK + rows)[:, None] + (i + inner)[None, :] * (2 * BLOCK))
        else:
            x = tl.load(matrix + (half * BLOCK + rows)[:, None] * (2 * BLOCK) + (i + inner)[None, :])
        y = tl.load(residuals + (base + i + inner)[:, None] * CONST.VALUES + columns[None, :])
        acc = tl.dot(x, y, acc, input_precision=CONST.INVERSE)
    here = base + half * BLOCK + rows
    y = acc * tl.load(weights + here)[:, None]
    tl.store(solved + here[:, None] * CONST.VALUES + columns[None, :], y)
    position = chunk * (2 * BLOCK) + half * BLOCK + rows
    inside = (position < length)[:, None] & (columns < E)[None, :]
    there = (head * length + position)[:, None] * E + columns[None, :]
    tl.store(out + there, y.to(out.dtype.element_ty), mask=inside)
    if CONST.BETA:
        if CONST.ADJOINT:
            product = tl.sum(acc * tl.load(z + there, mask=inside, other=0.0).to(tl.float32), 1)
            piece = (head * tl.num_programs(1) + tl.program_id(1)) * length + position
            tl.store(products + piece, product, mask=position < length)
        else:
            tl.store(z + there, acc.to(z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "tiles", "source", "source_end", "P"])
def update_kernel(system, solved, residuals, first, tiles, source, source_end, P, CONST: tl.constexpr):
    """residuals[target] −= s L[target, source] · solved[source], for all targets in tiles of ROWS.

    Targets are after the source or, for the adjoint, before it: what L is made of is symmetric.
    """
    ROWS: tl.constexpr = CONST.ROWS
    COLUMNS: tl.constexpr = CONST.COLUMNS
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    target = first + (pid % tiles) * ROWS
    base = head * P
    if CONST.PACKED:
        # A document's columns end, or begin, where it does.
        if target >= source_end:
            source = tl.maximum(source, tl.load(system.documents + target) // COLUMNS * COLUMNS)
        else:
            source_end = tl.minimum(source_end, tl.load(system.documents + P + target + ROWS - 1))
    if source < source_end:
        c = tl.load(system.sharpness + head)
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
        row_norms = tl.load(system.rnorm + base + target + rows)[:, None]
        if CONST.PIECE == CONST.FEATURES:
            row_keys = key_rows(system.keys, base + target, CONST.FEATURES, 0, ROWS, CONST.FEATURES)
        if CONST.PACKED:
            row_documents = tl.load(system.documents + target + rows)[:, None]
        acc = tl.zeros((ROWS, CONST.WIDTH), tl.float32)
        for j in range(source, source_end, COLUMNS):
            if CONST.PIECE == CONST.FEATURES:
                column_keys = key_columns(system.keys, base + j, CONST.FEATURES, 0, COLUMNS, CONST.FEATURES)
                scores = tl.dot(row_keys, column_keys, input_precision=CONST.PRECISION)
            else:
                scores = score_tile(
                    system.keys, base + target, system.keys, base + j, ROWS, COLUMNS, CONST.FEATURES, CONST.PIECE,
                    CONST.PRECISION, False,
                )  # fmt: skip
            scores *= row_norms * tl.load(system.rnorm + base + j + columns)[None, :]
            tile = exponentials(scores, c)
            if CONST.PACKED:
                tile = tl.where(row_documents == tl.load(system.documents + j + columns)[None, :], tile, 0.0)
            y = tl.load(solved + (base + j + columns)[:, None] * CONST.VALUES + wide[None, :])
            acc = tl.dot(tile, y, acc, input_precision=CONST.PRODUCT)
        here = residuals + (base + target + rows)[:, None] * CONST.VALUES + wide[None, :]
        tl.store(here, tl.load(here) - system.strength * acc)


@triton.jit
def gradient_tile(system, left, right, base, target, j, sharpness, CONST: tl.constexpr):
    """L ∘ (left · rightᵀ) and cos θ between rows at `target` and columns at `j`: twice [ROWS, COLUMNS]."""
    ROWS: tl.constexpr = CONST.ROWS
    COLUMNS: tl.constexpr = CONST.COLUMNS
    cosines = score_tile(
        system.keys, base + target, system.keys, base + j, ROWS, COLUMNS, CONST.FEATURES, CONST.PIECE,
        CONST.PRECISION, False,
    )  # fmt: skip
    row_norms = tl.load(system.rnorm + base + target + tl.arange(0, ROWS))[:, None]
    cosines *= row_norms * tl.load(system.rnorm + base + j + tl.arange(0, COLUMNS))[None, :]
    product = score_tile(
        left, base + target, right, base + j, ROWS, COLUMNS, CONST.VALUES, CONST.WIDTH, CONST.PRODUCT, True
    )
    w = product * exponentials(cosines, sharpness)
    if CONST.PACKED:
        w = tl.where(same_document(system, target, j, ROWS, COLUMNS), w, 0.0)
    return w, cosines


@triton.jit
def column_product(system, w, acc, base, j, CONST: tl.constexpr):
    """acc + w · diag(1/‖k‖) k, for the piece of the head size that this program writes."""
    w *= tl.load(system.rnorm + base + j + tl.arange(0, CONST.COLUMNS))[None, :]
    k = key_rows(system.keys, base + j, CONST.FEATURES, tl.program_id(1) * CONST.OUT, CONST.COLUMNS, CONST.OUT)
    return tl.dot(w, k.to(tl.float32), acc, input_precision=CONST.GRADIENT)


@triton.jit(do_not_specialize=["first_new", "tiles", "P"])
def key_gradient_kernel(system, values, gradients, du, row_sums, first_new, tiles, P, CONST: tl.constexpr):
    """du of a tile of positions, from the columns before them and the rows after them; every tile is made again.

    With W_ij = −s L_ij (g_i · y_j) for j < i, where g = dv, and u = k/‖k‖:

        du_p = c Σ_{j<p} W_pj u_j + c Σ_{i>p} W_ip u_i,   dc = Σ W (cos θ − 1)

    gradients: g, zero in the past. du: [n, P, D']. row_sums: [n, P], the terms of dc by row.
    """
    ROWS: tl.constexpr = CONST.ROWS
    COLUMNS: tl.constexpr = CONST.COLUMNS
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    target = (pid % tiles) * ROWS
    base = head * P
    c = tl.load(system.sharpness + head)
    rows = target + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    low = 0
    high = P
    if CONST.PACKED:
        low = tl.load(system.documents + target) // COLUMNS * COLUMNS
        high = tl.load(system.documents + P + target + ROWS - 1)
    # Rows of the past belong to no equation here.
    low_end = tl.where(target >= first_new, target + ROWS, low)
    sums = tl.zeros((ROWS,), tl.float32)
    before = tl.zeros((ROWS, CONST.OUT), tl.float32)
    for j in range(low, low_end, COLUMNS):
        w, cosines = gradient_tile(system, gradients, values, base, target, j, c, CONST)
        w = tl.where(j + columns < rows, w, 0.0)
        sums += tl.sum(w * (cosines - 1.0), 1)
        before = column_product(system, w, before, base, j, CONST)
    after = tl.zeros((ROWS, CONST.OUT), tl.float32)
    for j in range(tl.maximum(target // COLUMNS * COLUMNS, first_new), high, COLUMNS):
        w, cosines = gradient_tile(system, values, gradients, base, target, j, c, CONST)
        w = tl.where(j + columns > rows, w, 0.0)
        after = column_product(system, w, after, base, j, CONST)
    here = base + target + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        tl.store(row_sums + here, -system.strength * sums)
    features = tl.program_id(1) * CONST.OUT + tl.arange(0, CONST.OUT)
    tl.store(du + here[:, None] * CONST.FEATURES + features[None, :], (before + after) * (-system.strength * c))


@triton.jit(do_not_specialize=["first", "offset", "tiles", "length", "P"])
def project_kernel(
    system, du, dk, first, offset, tiles, length, P, D: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr
):
    """dk = (du − u (u·du)) / ‖k‖: only the part of du across u reaches the key. Rows as in `pack_keys_kernel`."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * ROWS + tl.arange(0, ROWS)
    here = head * P + rows
    columns = tl.arange(0, FEATURES)[None, :]
    u = tl.load(system.keys + here[:, None] * FEATURES + columns).to(tl.float32)
    u *= tl.load(system.rnorm + here)[:, None]
    grad = tl.load(du + here[:, None] * FEATURES + columns)
    grad -= u * tl.sum(u * grad, 1)[:, None]
    grad *= tl.load(system.inverse + here)[:, None]
    positions = (rows - offset)[:, None]
    inside = (positions >= 0) & (positions < length) & (columns < D)
    out = dk + (head * length + positions) * D + columns
    tl.store(out, grad.to(dk.dtype.element_ty), mask=inside)


class _Launches:
    """The launches for one system, padded: n heads of P positions of which the new ones start at `first`."""

    def __init__(self, system: System, v: Tensor, tiles: SolveTiles | None) -> None:
        (*heads, T, D), S = system.k.shape, system.past_length
        dtype = system.k.dtype if system.k_past is None else torch.promote_types(system.k.dtype, system.k_past.dtype)
        dtype_of_all = torch.promote_types(dtype, v.dtype)
        where = architecture(system.k.device)
        self.system, self.n, self.device = system, math.prod(heads), v.device
        self.multiply: Precisions = precisions(where, dtype_of_all)
        self.features = padded_size(D)
        self.tiles = tiles or solve_tiles(where, dtype_of_all, self.features, padded_size(v.shape[3]))
        self.values = max(padded_size(v.shape[3]), self.tiles.update.values)
        chunk = self.tiles.chunk
        self.first = triton.cdiv(S, chunk) * chunk
        self.P = self.first + triton.cdiv(T, chunk) * chunk
        self.chunk_count = (self.P - self.first) // chunk
        self.padded = self._pad_system(dtype)

    def _pad_system(self, dtype: torch.dtype) -> PaddedSystem:
        system, n, P = self.system, self.n, self.P
        keys = system.k.new_empty(n, P, self.features, dtype=dtype)
        rnorm, inverse = (system.k.new_empty(n, P, dtype=torch.float32) for _ in range(2))
        for k, past in ((system.k_past, True), (system.k, False)):
            if k is not None:
                self._pack(pack_keys_kernel, k, (keys, rnorm, inverse), past, (), PADDED=self.features)
        B, H, T, _ = system.k.shape
        weights = system.k.new_zeros(B, H, P, dtype=torch.float32)
        new = weights[:, :, self.first : self.first + T]
        new.copy_(system.beta) if system.beta is not None else new.fill_(1)
        if system.key_mask is not None:
            new.masked_fill_(~system.key_mask[:, None, system.past_length :], 0)
        documents = system.k.new_empty(0, dtype=torch.int32)
        if system.cu_seqlens is not None:
            documents = packing.document_bounds(system.cu_seqlens, T, P, system.k.device)
        c = system.sharpness
        c = c.reshape(n).float().contiguous() if isinstance(c, Tensor) else rnorm.new_full((n,), c)
        return PaddedSystem(keys, rnorm, inverse, weights.view(n, P), documents, c, system.strength)

    def _pack(
        self, kernel: triton.JITFunction, x: Tensor, outs: tuple[Tensor, ...], past: bool, more: tuple[int, ...],
        **sizes: int,
    ) -> None:  # fmt: skip
        """Copy x: [B, H, *, size] to its rows among the past or the new positions of `outs`: [n, P, *]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        low, high = (0, self.first) if past else (self.first, self.P)
        H, length, mask = x.shape[1], x.shape[2], self.system.key_mask
        if mask is not None:
            mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
            mask = mask[:, 0 if past else self.system.past_length :]
        tiles = (high - low) // PACK_ROWS
        kernel[(self.n * tiles, *more)](
            x, outs[0] if mask is None else mask, *outs, H, *x.stride()[:3], 0 if mask is None else mask.stride(0),
            length, high - length if past else low, low, tiles, self.P, SIZE=x.shape[3], **sizes, ROWS=PACK_ROWS,
            MASKED=mask is not None, num_warps=4, **registers(kernel, self.device),
        )  # fmt: skip

    def value_buffer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.padded.keys.new_empty(self.n, self.P, self.values, dtype=dtype)

    def pack_values(self, x: Tensor | None, out: Tensor, past: bool) -> None:
        """Copy x [B, H, *, E] to its places among the past or the new positions of `out`; None: zeros."""
        low, high = (0, self.first) if past else (self.first, self.P)
        if low == high:
            return
        if x is None:
            out[:, low:high] = 0
            return
        piece = min(64, self.values)
        pieces = (triton.cdiv(self.values, piece),)
        self._pack(pack_values_kernel, x, (out,), past, pieces, PADDED=self.values, PIECE=piece)

    def _launch(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], tile: Tile, *arguments: object, **constants: Any
    ) -> None:
        """Launch a kernel that makes tiles of L. constants: those of `Constants` beyond what all of them need."""
        const = Constants(
            FEATURES=self.features, VALUES=self.values, PIECE=min(tile.keys, self.features),
            PACKED=self.system.cu_seqlens is not None, PRECISION=self.multiply.keys, **constants,
        )  # fmt: skip
        kernel[grid](
            self.padded, *arguments, P=self.P, CONST=const, num_warps=tile.warps, num_stages=tile.stages,
            **registers(kernel, self.device),
        )  # fmt: skip

    def inverses(self, adjoint: bool) -> Tensor:
        """[n, chunks, 2 · BLOCK, 2 · BLOCK]."""
        block, count, tiles = self.tiles.block, self.chunk_count, self.tiles
        chunks = self.padded.keys.new_empty(self.n, count, 2 * block, 2 * block, dtype=torch.float32)
        grid = (self.n * 2 * count,)
        self._launch(inverse_kernel, grid, tiles.inverse, chunks, self.first, 2 * count, BLOCK=block, ADJOINT=adjoint)
        columns = min(tiles.merge.cols, block)
        self._launch(
            merge_kernel, (self.n * count, block // columns), tiles.merge, chunks, self.first, count, BLOCK=block,
            ADJOINT=adjoint, COLUMNS=columns, INVERSE=self.multiply.inverse,
        )  # fmt: skip
        return chunks

    def update(self, solved: Tensor, residuals: Tensor, targets: tuple[int, int], source: tuple[int, int]) -> None:
        """Subtract the columns [source) of solved rows from the residuals of the rows [targets)."""
        tile = self.tiles.update
        count = (targets[1] - targets[0]) // tile.rows
        if count <= 0 or source[0] >= source[1]:
            return
        self._launch(
            update_kernel, (self.n * count, self.values // tile.values), tile, solved, residuals, targets[0], count,
            *source, ROWS=tile.rows, COLUMNS=tile.cols, WIDTH=tile.values, PRODUCT=self.multiply.values,
        )  # fmt: skip

    def sweep(
        self, residuals: Tensor, solved: Tensor, out: Tensor, z: Tensor | None, products: Tensor | None, adjoint: bool
    ) -> None:
        """Solve all chunks in order, or for the adjoint in reverse order."""
        tile, chunk, strip = self.tiles.solve, self.tiles.chunk, self.tiles.strip
        chunks = self.inverses(adjoint)
        outputs = out, out if z is None else z, out if products is None else products
        const = Constants(
            VALUES=self.values, WIDTH=tile.values, COLUMNS=tile.cols, BLOCK=self.tiles.block, ADJOINT=adjoint,
            BETA=z is not None, INVERSE=self.multiply.inverse,
        )  # fmt: skip
        strips = list(range(self.first, self.P, strip))
        for low in reversed(strips) if adjoint else strips:
            high = min(low + strip, self.P)
            starts = list(range(low, high, chunk))
            for start in reversed(starts) if adjoint else starts:
                solve_kernel[(self.n * 2, self.values // tile.values)](
                    self.padded.weights, chunks, residuals, solved, *outputs, (start - self.first) // chunk,
                    self.chunk_count, self.first, out.shape[2], self.P, E=out.shape[3], CONST=const,
                    num_warps=tile.warps, num_stages=tile.stages, **registers(solve_kernel, self.device),
                )  # fmt: skip
                rest = (low, start) if adjoint else (start + chunk, high)
                self.update(solved, residuals, rest, (start, start + chunk))
            self.update(solved, residuals, (0, low) if adjoint else (high, self.P), (low, high))

    def key_gradients(self, y: Tensor, g: Tensor, out: Gradients) -> None:
        """Write the gradients of keys and sharpness. g: [n, P, E'], overwritten in the past."""
        tile, system, padded = self.tiles.gradient, self.system, self.padded
        dtype = y.dtype if system.y_past is None else torch.promote_types(y.dtype, system.y_past.dtype)
        values = self.value_buffer(dtype)
        self.pack_values(y, values, past=False)
        self.pack_values(system.y_past, values, past=True)
        self.pack_values(None, g, past=True)
        du, row_sums = (
            padded.keys.new_empty(padded.keys.shape, dtype=torch.float32),
            padded.rnorm.new_empty(padded.rnorm.shape),
        )
        count, width = self.P // tile.rows, min(tile.out, self.features)
        self._launch(
            key_gradient_kernel, (self.n * count, self.features // width), tile, values, g, du, row_sums, self.first,
            count, OUT=width, WIDTH=min(tile.values, self.values), ROWS=tile.rows, COLUMNS=tile.cols,
            PRODUCT=self.multiply.values, GRADIENT=self.multiply.gradient,
        )  # fmt: skip
        if out.dsharpness is not None:
            out.dsharpness.copy_(row_sums[:, self.first :].sum(1).view(out.dsharpness.shape))
        past = self.first - system.past_length
        for dk, low, high, offset in ((out.dk_past, 0, self.first, past), (out.dk, self.first, self.P, self.first)):
            if dk is not None:
                tiles = (high - low) // PACK_ROWS
                project_kernel[(self.n * tiles,)](
                    padded, du, dk, low, offset, tiles, dk.shape[2], self.P, D=dk.shape[3], FEATURES=self.features,
                    ROWS=PACK_ROWS, num_warps=8, **registers(project_kernel, self.device),
                )  # fmt: skip


def forward(system: System, v: Tensor, y: Tensor, z: Tensor | None, tiles: SolveTiles | None = None) -> None:
    """Write y [B, H, T, E] and, if it is not None, z [B, H, T, E], both contiguous."""
    with on_device(v):
        launches = _Launches(system, v, tiles)
        residuals, solved = launches.value_buffer(), launches.value_buffer()
        launches.pack_values(v, residuals, past=False)
        launches.pack_values(system.y_past, solved, past=True)
        launches.update(solved, residuals, (launches.first, launches.P), (0, launches.first))
        launches.sweep(residuals, solved, y, z, None, adjoint=False)


def backward(
    system: System, dy: Tensor, y: Tensor, z: Tensor | None, out: Gradients, tiles: SolveTiles | None = None
) -> None:
    """Write all gradients that have a buffer in `out`, contiguous. dk is needed for dk_past and dsharpness."""
    with on_device(dy):
        launches = _Launches(system, y, tiles)
        residuals, g = launches.value_buffer(), launches.value_buffer()
        launches.pack_values(dy, residuals, past=False)
        launches.pack_values(None, residuals, past=True)
        products = None
        if z is not None:
            pieces = launches.values // launches.tiles.solve.values
            products = dy.new_empty(launches.n, pieces, dy.shape[2], dtype=torch.float32)
        launches.sweep(residuals, g, out.dv, z, products, adjoint=True)
        if out.dbeta is not None and products is not None:
            out.dbeta.copy_(system.zero_masked(products.sum(1).view(out.dbeta.shape)))
        if out.dy_past is not None:
            past = residuals[:, launches.first - system.past_length : launches.first, : dy.shape[3]]
            past = past.reshape(out.dy_past.shape)
            if system.key_mask is not None:
                past = past.masked_fill(~system.key_mask[:, None, : system.past_length, None], 0)
            out.dy_past.copy_(past)
        if out.dk is not None:
            launches.key_gradients(y, g, out)
