"""The kernel of the gradients of keys and sharpness. Layout and letters as in `triton_kernels.py`."""

import triton
import triton.language as tl

from ..triton_tiles import exponentials, key_rows, score_tile


@triton.jit
def gradient_tile(
    keys,
    rnorm,
    documents,
    left,
    right,
    base,
    target,
    j,
    sharpness,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """L ∘ (left · rightᵀ) and cos θ between rows at `target` and columns at `j`: twice [ROWS, COLUMNS]."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    cosines = score_tile(keys, base + target, keys, base + j, ROWS, COLUMNS, FEATURES, PIECE, PRECISION, False)
    cosines *= tl.load(rnorm + base + target + rows)[:, None] * tl.load(rnorm + base + j + columns)[None, :]
    product = score_tile(left, base + target, right, base + j, ROWS, COLUMNS, VALUES, WIDTH, PRODUCT, True)
    w = product * exponentials(cosines, sharpness)
    if PACKED:
        same = tl.load(documents + target + rows)[:, None] == tl.load(documents + j + columns)[None, :]
        w = tl.where(same, w, 0.0)
    return w, cosines


@triton.jit
def column_product(
    keys,
    rnorm,
    w,
    acc,
    base,
    j,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    OUT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """acc + w · diag(1/‖k‖) k, for the piece of the head size that this program writes."""
    w *= tl.load(rnorm + base + j + tl.arange(0, COLUMNS))[None, :]
    k = key_rows(keys, base + j, FEATURES, tl.program_id(1) * OUT, COLUMNS, OUT)
    return tl.dot(w, k.to(tl.float32), acc, input_precision=PRODUCT)


@triton.jit(do_not_specialize=["first_new", "tiles", "P"])
def key_gradient_kernel(
    keys,
    rnorm,
    documents,
    sharpness,
    values,
    gradients,
    du,
    row_sums,
    strength,
    first_new,
    tiles,
    P,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    OUT: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """du of a tile of positions, from the columns before them and the rows behind them; every tile is made again.

    With W_ij = −s L_ij (g_i · y_j) for j < i, where g = dv, and u = k/‖k‖:

        du_p = c Σ_{j<p} W_pj u_j + c Σ_{i>p} W_ip u_i,   dc = Σ W (cos θ − 1)

    gradients: g, zero in the past. du: [n, P, D']. row_sums: [n, P], the terms of dc by row.
    """
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    target = (pid % tiles) * ROWS
    base = head * P
    c = tl.load(sharpness + head)
    rows = target + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    low = 0
    high = P
    if PACKED:
        low = tl.load(documents + target) // COLUMNS * COLUMNS
        high = tl.load(documents + P + target + ROWS - 1)
    # Rows of the past belong to no equation here.
    low_end = tl.where(target >= first_new, target + ROWS, low)
    sums = tl.zeros((ROWS,), tl.float32)
    before = tl.zeros((ROWS, OUT), tl.float32)
    for j in range(low, low_end, COLUMNS):
        w, cosines = gradient_tile(
            keys, rnorm, documents, gradients, values, base, target, j, c,
            ROWS, COLUMNS, FEATURES, PIECE, VALUES, WIDTH, PACKED, PRECISION, PRODUCT,
        )  # fmt: skip
        w = tl.where(j + columns < rows, w, 0.0)
        sums += tl.sum(w * (cosines - 1.0), 1)
        before = column_product(keys, rnorm, w, before, base, j, COLUMNS, FEATURES, OUT, GRADIENT)
    behind = tl.zeros((ROWS, OUT), tl.float32)
    for j in range(tl.maximum(target // COLUMNS * COLUMNS, first_new), high, COLUMNS):
        w, cosines = gradient_tile(
            keys, rnorm, documents, values, gradients, base, target, j, c,
            ROWS, COLUMNS, FEATURES, PIECE, VALUES, WIDTH, PACKED, PRECISION, PRODUCT,
        )  # fmt: skip
        w = tl.where(j + columns > rows, w, 0.0)
        behind = column_product(keys, rnorm, w, behind, base, j, COLUMNS, FEATURES, OUT, GRADIENT)
    here = base + target + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        tl.store(row_sums + here, -strength * sums)
    features = tl.program_id(1) * OUT + tl.arange(0, OUT)
    tl.store(du + here[:, None] * FEATURES + features[None, :], (before + behind) * (-strength * c))


@triton.jit(do_not_specialize=["first", "offset", "tiles", "length", "P"])
def project_kernel(
    keys,
    rnorm,
    inverse,
    du,
    dk,
    first,
    offset,
    tiles,
    length,
    P,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dk = (du − u (u·du)) / ‖k‖: only the part of du across u reaches the key. Rows as in `pack_keys_kernel`."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * ROWS + tl.arange(0, ROWS)
    here = head * P + rows
    columns = tl.arange(0, FEATURES)[None, :]
    u = tl.load(keys + here[:, None] * FEATURES + columns).to(tl.float32) * tl.load(rnorm + here)[:, None]
    grad = tl.load(du + here[:, None] * FEATURES + columns)
    grad -= u * tl.sum(u * grad, 1)[:, None]
    grad *= tl.load(inverse + here)[:, None]
    positions = (rows - offset)[:, None]
    inside = (positions >= 0) & (positions < length) & (columns < D)
    out = dk + (head * length + positions) * D + columns
    tl.store(out, grad.to(dk.dtype.element_ty), mask=inside)
