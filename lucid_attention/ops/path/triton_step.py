"""Kernels of one decoding step of PaTH and LUCID-PaTH.

`path_step_prepare_kernel` brings the pending product and the live keys up to the new token, and applies the product to
the rows that meet the cached keys. `path_step_split_kernel` reads K and Y once, each program a part of them (split-K).
`path_step_combine_kernel` puts the parts together, makes y of the new token, and reads it.

Rows of a head: G queries and, with a solve, its new key, then padding. Sizes of heads are padded to powers of two in
the buffers between the kernels, which are float32.
"""

import triton
import triton.language as tl

from ..triton_tiles import LOG2_E, combine_splits


@triton.jit(
    do_not_specialize=[
        "H", "count", "live", "k_stride_b", "k_stride_h", "k_stride_t", "alive_stride_b", "alive_stride_h",
        "alive_stride_t", "n_stride_b", "n_stride_h", "n_stride_t", "stride_mask",
    ],
    do_not_specialize_on_alignment=["k", "alive", "norms", "mask"],
)  # fmt: skip
def path_step_prepare_kernel(
    q,
    k,
    w,
    beta,
    product,
    alive,
    norms,
    mask,
    sharpness,
    rows_out,
    moving_out,
    product_out,
    moved_out,
    H,
    count,
    live,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    alive_stride_b,
    alive_stride_h,
    alive_stride_t,
    n_stride_b,
    n_stride_h,
    n_stride_t,
    stride_mask,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    DEPTH: tl.constexpr,
    SOLVES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """product ← product − β w (wᵀ product), [n, D, D]; rows and rows · product, [n, ROWS, FEATURES]; live keys moved
    and the new one behind them, [n, live + 1, D]. A program makes PIECE columns of each.

    q: [n, G, D], w: [n, D], beta: [n], product: [n, D, D], contiguous. norms: 1/‖k‖ of the keys.
    """
    n = tl.program_id(0).to(tl.int64)
    batch, head = n // H, n % H
    hidden = tl.zeros((1,), tl.int32)
    if MASKED:
        hidden += 1 - tl.load(mask + batch * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    features = tl.arange(0, FEATURES)
    shown = hidden == 0
    b = tl.where(shown, tl.load(beta + n).to(tl.float32), 0.0)
    here = (columns < D) & shown
    w_here = tl.load(w + n * D + columns, mask=here, other=0.0).to(tl.float32)
    new = k + batch * k_stride_b + head * k_stride_h + count.to(tl.int64) * k_stride_t
    factor = 0.0
    if SOLVES:
        own = norms + batch * n_stride_b + head * n_stride_h + count.to(tl.int64) * n_stride_t
        factor = tl.load(sharpness + n) * tl.load(own).to(tl.float32)
    along = tl.zeros((PIECE,), tl.float32)
    for i in range(0, FEATURES, DEPTH):
        deep = i + tl.arange(0, DEPTH)
        inside = (deep < D)[:, None] & (columns < D)[None, :]
        m = tl.load(product + n * (D * D) + deep[:, None] * D + columns[None, :], mask=inside, other=0.0)
        w_deep = tl.load(w + n * D + deep, mask=(deep < D) & shown, other=0.0).to(tl.float32)
        along += tl.sum(m.to(tl.float32) * w_deep[:, None], 0)
    moving = tl.zeros((ROWS, PIECE), tl.float32)
    for i in range(0, FEATURES, DEPTH):
        deep = i + tl.arange(0, DEPTH)
        inside = (deep < D)[:, None] & (columns < D)[None, :]
        there = n * (D * D) + deep[:, None] * D + columns[None, :]
        w_deep = tl.load(w + n * D + deep, mask=(deep < D) & shown, other=0.0).to(tl.float32)
        m = tl.load(product + there, mask=inside, other=0.0).to(tl.float32) - (b * w_deep)[:, None] * along[None, :]
        tl.store(product_out + there, m, mask=inside)
        seen = (rows < G) & (deep < D)[None, :] & shown
        x = tl.load(q + (n * G + rows) * D + deep[None, :], mask=seen, other=0.0).to(tl.float32) * scale
        if SOLVES:
            key = tl.load(new + deep, mask=(deep < D) & shown, other=0.0).to(tl.float32)
            x = tl.where(rows == G, (key * factor)[None, :], x)
        if tl.program_id(1) == 0:
            tl.store(rows_out + (n * ROWS + rows) * FEATURES + deep[None, :], x)
        moving = tl.dot(x, m, moving, input_precision=PRECISION)
    tl.store(moving_out + (n * ROWS + rows) * FEATURES + columns[None, :], moving)
    w_whole = tl.load(w + n * D + features, mask=(features < D) & shown, other=0.0).to(tl.float32)
    start = alive + batch * alive_stride_b + head * alive_stride_h
    for j in range(0, live, DEPTH):
        tokens = j + tl.arange(0, DEPTH)
        from_here = start + tokens.to(tl.int64)[:, None] * alive_stride_t
        inside = (tokens < live)[:, None]
        x = tl.load(from_here + features[None, :], mask=inside & (features < D)[None, :], other=0.0).to(tl.float32)
        piece = tl.load(from_here + columns[None, :], mask=inside & (columns < D)[None, :], other=0.0).to(tl.float32)
        piece -= (b * tl.sum(x * w_whole[None, :], 1))[:, None] * w_here[None, :]
        to = moved_out + (n * (live + 1) + tokens)[:, None] * D + columns[None, :]
        tl.store(to, piece, mask=inside & (columns < D)[None, :])
    key = tl.load(new + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(moved_out + (n * (live + 1) + live) * D + columns, key, mask=columns < D)


@triton.jit
def read_keys(
    x,
    keys,
    key_stride,
    first,
    y,
    y_stride,
    norms,
    norm_stride,
    tokens,
    seen,
    top,
    total,
    acc,
    c,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    SOLVES: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Put tokens [COLUMNS] into maxima, sums and products with values.

    x: rows [ROWS, FEATURES]; keys: of the tokens from `first` on.
    """
    rows = tl.arange(0, ROWS)
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(0, FEATURES, PIECE):
        deep = i + tl.arange(0, PIECE)
        left = tl.load(x + rows[:, None] * FEATURES + deep[None, :])
        there = keys + (tokens - first)[None, :] * key_stride + deep[:, None]
        right = tl.load(there, mask=seen[None, :] & (deep < D)[:, None], other=0.0).to(tl.float32)
        scores = tl.dot(left, right, scores, input_precision=PRECISION)
    is_key = rows == G
    if SOLVES:
        inverse = tl.load(norms + tokens * norm_stride, mask=seen, other=0.0).to(tl.float32)
        scores = tl.where(is_key[:, None], scores * inverse[None, :] - c, scores)
    scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    if SOLVES:
        # The largest exponent of the key's row is its own, 0.
        highest = tl.where(is_key, 0.0, highest)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    wide = tl.arange(0, VALUES)[None, :]
    values = tl.load(y + tokens[:, None] * y_stride + wide, mask=seen[:, None] & (wide < E), other=0.0)
    acc = tl.dot(weights, values.to(tl.float32), acc * shrink[:, None], input_precision=PRODUCT)
    return highest, total * shrink + tl.sum(weights, 1), acc


@triton.jit(
    do_not_specialize=[
        "H", "count", "pending", "live", "splits", "k_stride_b", "k_stride_h", "k_stride_t", "y_stride_b", "y_stride_h",
        "y_stride_t", "n_stride_b", "n_stride_h", "n_stride_t", "stride_mask",
    ]
)  # fmt: skip
def path_step_split_kernel(
    rows_in,
    moving_in,
    moved,
    k,
    y,
    norms,
    mask,
    sharpness,
    maxima,
    sums,
    parts,
    H,
    count,
    pending,
    live,
    splits,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    y_stride_b,
    y_stride_h,
    y_stride_t,
    n_stride_b,
    n_stride_h,
    n_stride_t,
    stride_mask,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    SOLVES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Maxima and sums of the exponentials, [n, splits, ROWS], and their products with Y, [n, splits, ROWS, VALUES].

    The first `pending` keys are read from the cache, by the moved rows; the live ones from `moved`, by the rows.
    """
    pid = tl.program_id(0)
    n = (pid // splits).to(tl.int64)
    split = pid % splits
    batch, head = n // H, n % H
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    wide = tl.arange(0, VALUES)
    c = 0.0
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    if SOLVES:
        c = tl.load(sharpness + n)
        top = tl.where(rows == G, 0.0, top)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    per = tl.cdiv(tl.cdiv(count, splits), COLUMNS) * COLUMNS
    low = split * per
    high = tl.minimum(low + per, count)
    k += batch * k_stride_b + head * k_stride_h
    y += batch * y_stride_b + head * y_stride_h
    norms += batch * n_stride_b + head * n_stride_h
    moved += n * (live + 1) * D
    end = tl.minimum(high, pending)
    for start in range(low, end, COLUMNS):
        tokens = (start + columns).to(tl.int64)
        seen = tokens < end
        if MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        top, total, acc = read_keys(
            moving_in + n * (ROWS * FEATURES), k, k_stride_t, 0, y, y_stride_t, norms, n_stride_t, tokens, seen,
            top, total, acc, c, G, D, FEATURES, E, VALUES, ROWS, COLUMNS, PIECE, SOLVES, PRECISION, PRODUCT,
        )  # fmt: skip
    for start in range(tl.maximum(low, pending), high, COLUMNS):
        tokens = (start + columns).to(tl.int64)
        seen = tokens < high
        if MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        top, total, acc = read_keys(
            rows_in + n * (ROWS * FEATURES), moved, D, pending, y, y_stride_t, norms, n_stride_t, tokens, seen,
            top, total, acc, c, G, D, FEATURES, E, VALUES, ROWS, COLUMNS, PIECE, SOLVES, PRECISION, PRODUCT,
        )  # fmt: skip
    here = (n * splits + split) * ROWS + rows
    tl.store(maxima + here, top)
    tl.store(sums + here, total)
    tl.store(parts + here[:, None] * VALUES + wide[None, :], acc)


@triton.jit(do_not_specialize=["H", "count", "live", "splits", "stride_mask"])
def path_step_combine_kernel(
    rows_in,
    moved,
    v,
    mask,
    maxima,
    sums,
    parts,
    y,
    out,
    H,
    count,
    live,
    splits,
    stride_mask,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SOLVES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """y = v − Σ P y, or v, [n, E], and `out` [n, G, E], which reads it. v: [n, E]."""
    n = tl.program_id(0).to(tl.int64)
    hidden = tl.zeros((1,), tl.int32)
    if MASKED:
        hidden += 1 - tl.load(mask + n // H * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, ROWS)
    features = tl.arange(0, FEATURES)
    wide = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    top, total, acc = combine_splits(maxima, sums, parts, n, splits, wide, ROWS, VALUES, WIDTH)
    new = tl.load(v + n * E + wide, mask=(wide < E) & (hidden == 0), other=0.0).to(tl.float32)
    if SOLVES:
        solved = tl.sum(tl.where((rows == G)[:, None], acc, 0.0), 0)
        new = tl.where(hidden == 0, new - solved, 0.0)
    stored = new.to(y.dtype.element_ty)
    tl.store(y + n * E + wide, stored, mask=wide < E)
    # The new key among the keys that the queries read.
    x = tl.load(rows_in + (n * ROWS + rows)[:, None] * FEATURES + features[None, :])
    key = tl.load(moved + (n * (live + 1) + live) * D + features, mask=features < D, other=0.0)
    score = tl.sum(x * key[None, :], 1) * LOG2_E
    highest = tl.maximum(top, score)
    shrink, weight = tl.exp2(top - highest), tl.exp2(score - highest)
    total = total * shrink + weight
    acc = (acc * shrink[:, None] + weight[:, None] * stored.to(tl.float32)[None, :]) / total[:, None]
    acc = tl.where(hidden == 0, acc, 0.0)
    here = out + (n * G + rows)[:, None] * E + wide[None, :]
    tl.store(here, acc.to(out.dtype.element_ty), mask=(rows < G)[:, None] & (wide < E)[None, :])
