"""Kernels of one decoding step: K and Y are each read once, for the queries and the new key's row of P together.

`step_split_kernel` gives every program a part of the cache (split-K), `step_combine_kernel` puts the parts together,
makes y of the new token, writes it, and reads it. The cache is [B, H, places, *] in any strides or, if PAGE is not 0,
pages: `table` [B, pages] has the page of every PAGE tokens. The new key lies in the cache at place `count`, the number
of keys before it, which comes as a number or from the device (COUNTED).

Rows of a program's tile: G queries of a key/value head, then its new key, then padding.
"""

import triton
import triton.language as tl

from ..triton_tiles import LOG2_E, put_together


@triton.jit
def places(cache, table, stride_b, stride_h, stride_t, stride_table, batch, head, tokens, inside, PAGE: tl.constexpr):
    """Pointers to the rows of a cache for positions [N] of a sequence."""
    start = cache + head * stride_h
    if PAGE:
        pages = tl.load(table + batch * stride_table + tokens // PAGE, mask=inside, other=0).to(tl.int64)
        return start + pages * stride_b + (tokens % PAGE) * stride_t
    return start + batch * stride_b + tokens.to(tl.int64) * stride_t


@triton.jit
def row_operand(
    q,
    k,
    table,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    stride_table,
    batch,
    head,
    count,
    hidden,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The queries, then the new key times a power of two that brings it near 1, in float32: [ROWS, FEATURES]; and what
    the key was multiplied with. A hidden token's infinities and NaN are zero."""
    rows = tl.arange(0, ROWS)
    features = tl.arange(0, FEATURES)[None, :]
    here = (rows < G)[:, None] & (features < D)
    x = tl.load(q + batch * q_stride_b + (head * G + rows)[:, None] * q_stride_h + features, mask=here, other=0.0)
    x = x.to(tl.float32)
    one = tl.zeros((1,), tl.int32) + count
    new = places(
        k, table, k_stride_b, k_stride_h, k_stride_t, stride_table, batch, head, one, one >= 0, PAGE
    )  # fmt: skip
    key = tl.load(new[:, None] + features, mask=features < D, other=0.0).to(tl.float32)
    x = tl.where((tl.abs(x) < float("inf")) | (hidden == 0), x, 0.0)
    key = tl.where((tl.abs(key) < float("inf")) | (hidden == 0), key, 0.0)
    exponent = (tl.max(tl.abs(key)).to(tl.int32, bitcast=True) >> 23) & 255
    # Cached keys are not scaled: this one is, so small that no product overflows. Float16 cannot, but is coarse there.
    middle = 262 if k.dtype.element_ty == tl.float16 else 246
    power = (tl.minimum(tl.maximum(middle - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    return tl.where((rows == G)[:, None], key * power, x), power


@triton.jit
def row_factors(x, inverse, power, scale, c, G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, QK: tl.constexpr):
    """What the rows' products with keys are multiplied with to be exponents of 2: [ROWS]."""
    queries = tl.zeros((ROWS,), tl.float32) + scale
    if QK:
        largest = tl.max(tl.abs(x), 1)
        part = x / tl.where(largest > 0, largest, 1.0)[:, None]
        length = largest * tl.sqrt_rn(tl.sum(part * part, 1))
        queries *= tl.where(length > 0, D / tl.where(length > 0, length, 1.0), 0.0)
    return tl.where(tl.arange(0, ROWS) == G, c * inverse / power, queries) * LOG2_E


@triton.jit(
    do_not_specialize=[
        "H", "count", "q_stride_b", "q_stride_h", "k_stride_b", "k_stride_h", "k_stride_t", "y_stride_b", "y_stride_h",
        "y_stride_t", "n_stride_b", "n_stride_h", "n_stride_t", "stride_mask", "stride_table", "stride_counts",
        "splits",
    ]
)  # fmt: skip
def step_split_kernel(
    q,
    k,
    y,
    norms,
    mask,
    table,
    counts,
    sharpness,
    maxima,
    sums,
    parts,
    H,
    count,
    q_stride_b,
    q_stride_h,
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
    stride_table,
    stride_counts,
    splits,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    COUNTED: tl.constexpr,
    MASKED: tl.constexpr,
    QK: tl.constexpr,
    PRECISION: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Maxima and sums of the exponentials, [n, splits, ROWS], and their products with Y, [n, splits, ROWS, VALUES]."""
    pid = tl.program_id(0)
    n = (pid // splits).to(tl.int64)
    split = pid % splits
    batch, head = n // H, n % H
    if COUNTED:
        count = tl.load(counts + batch * stride_counts).to(tl.int32)
    hidden = 0
    if MASKED:
        hidden = 1 - tl.load(mask + batch * stride_mask + count).to(tl.int32)
    x, power = row_operand(
        q, k, table, q_stride_b, q_stride_h, k_stride_b, k_stride_h, k_stride_t, stride_table,
        batch, head, count, hidden, G, D, FEATURES, ROWS, PAGE,
    )  # fmt: skip
    c = tl.load(sharpness + n)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    features = tl.arange(0, FEATURES)
    wide = tl.arange(0, VALUES)
    is_key = (rows == G)[:, None]
    one = tl.zeros((1,), tl.int32) + count
    own = places(norms, table, n_stride_b, n_stride_h, n_stride_t, stride_table, batch, head, one, one >= 0, PAGE)
    factors = row_factors(x, tl.sum(tl.load(own).to(tl.float32)), power, scale, c, G, D, ROWS, QK)[:, None]
    shift = tl.where(is_key, c * LOG2_E, 0.0)
    x = x.to(k.dtype.element_ty)
    top = tl.where(rows == G, 0.0, float("-inf"))
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    per = tl.cdiv(tl.cdiv(count, splits), COLUMNS) * COLUMNS
    for start in range(split * per, tl.minimum((split + 1) * per, count), COLUMNS):
        tokens = start + columns
        seen = tokens < count
        if MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        there = places(k, table, k_stride_b, k_stride_h, k_stride_t, stride_table, batch, head, tokens, seen, PAGE)
        keys = tl.load(there[None, :] + features[:, None], mask=seen[None, :] & (features < D)[:, None], other=0.0)
        scores = tl.dot(x, keys, input_precision=PRECISION) * factors
        there = places(norms, table, n_stride_b, n_stride_h, n_stride_t, stride_table, batch, head, tokens, seen, PAGE)
        inverse = tl.load(there, mask=seen, other=0.0).to(tl.float32)[None, :]
        scores *= inverse if QK else tl.where(is_key, inverse, 1.0)
        scores = tl.where(seen[None, :], scores - shift, float("-inf"))
        # The largest exponent of the key's row is its own, 0.
        highest = tl.where(rows == G, 0.0, tl.maximum(top, tl.max(scores, 1)))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(weights, 1)
        there = places(y, table, y_stride_b, y_stride_h, y_stride_t, stride_table, batch, head, tokens, seen, PAGE)
        values = tl.load(there[:, None] + wide[None, :], mask=seen[:, None] & (wide < E)[None, :], other=0.0)
        acc = tl.dot(weights, values.to(tl.float32), acc * shrink[:, None], input_precision=PRODUCT)
        top = highest
    here = (n * splits + split) * ROWS + rows
    tl.store(maxima + here, top)
    tl.store(sums + here, total)
    tl.store(parts + here[:, None] * VALUES + wide[None, :], acc)


@triton.jit(
    do_not_specialize=[
        "H", "count", "q_stride_b", "q_stride_h", "k_stride_b", "k_stride_h", "k_stride_t", "y_stride_b", "y_stride_h",
        "y_stride_t", "n_stride_b", "n_stride_h", "n_stride_t", "v_stride_b", "v_stride_h", "stride_mask",
        "stride_table", "stride_counts", "splits",
    ]
)  # fmt: skip
def step_combine_kernel(
    q,
    k,
    v,
    y,
    norms,
    mask,
    table,
    counts,
    sharpness,
    beta,
    maxima,
    sums,
    parts,
    out,
    H,
    count,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    y_stride_b,
    y_stride_h,
    y_stride_t,
    n_stride_b,
    n_stride_h,
    n_stride_t,
    stride_mask,
    stride_table,
    stride_counts,
    splits,
    scale,
    strength,
    G: tl.constexpr,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    E: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    COUNTED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    MASKED: tl.constexpr,
    QK: tl.constexpr,
    BETA: tl.constexpr,
):
    """y = β (v − s Σ P y) to place `count` of `y` (IN_PLACE) or to place 0, and `out` [n, G, E], which reads it."""
    n = tl.program_id(0).to(tl.int64)
    batch, head = n // H, n % H
    if COUNTED:
        count = tl.load(counts + batch * stride_counts).to(tl.int32)
    hidden = 0
    if MASKED:
        hidden = 1 - tl.load(mask + batch * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, ROWS)
    wide = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    top, total, acc = put_together(maxima, sums, parts, n, splits, wide, ROWS, VALUES, WIDTH)
    solved = tl.sum(tl.where((rows == G)[:, None], acc, 0.0), 0)
    new = tl.load(v + batch * v_stride_b + head * v_stride_h + wide, mask=wide < E, other=0.0).to(tl.float32)
    new -= strength * solved
    if BETA:
        new *= tl.load(beta + n)
    new = tl.where(hidden == 0, new, 0.0).to(y.dtype.element_ty)
    one = tl.zeros((1,), tl.int32) + (count if IN_PLACE else 0)
    there = places(y, table, y_stride_b, y_stride_h, y_stride_t, stride_table, batch, head, one, one >= 0, PAGE)
    tl.store(there[:, None] + wide[None, :], new[None, :], mask=(wide < E)[None, :])
    # The new key among the keys that the queries read.
    c = tl.load(sharpness + n)
    x, power = row_operand(
        q, k, table, q_stride_b, q_stride_h, k_stride_b, k_stride_h, k_stride_t, stride_table,
        batch, head, count, hidden, G, D, FEATURES, ROWS, PAGE,
    )  # fmt: skip
    one = tl.zeros((1,), tl.int32) + count
    own = places(norms, table, n_stride_b, n_stride_h, n_stride_t, stride_table, batch, head, one, one >= 0, PAGE)
    inverse = tl.sum(tl.load(own).to(tl.float32))
    factors = row_factors(x, inverse, power, scale, c, G, D, ROWS, QK)
    key = tl.sum(tl.where((rows == G)[:, None], x, 0.0), 0) / power
    score = tl.sum(x * key[None, :], 1) * factors
    if QK:
        score *= inverse
    score = tl.where(hidden == 0, score, float("-inf"))
    highest = tl.maximum(top, score)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    shrink, weight = tl.exp2(top - finite), tl.exp2(score - finite)
    total = total * shrink + weight
    acc = acc * shrink[:, None] + weight[:, None] * new.to(tl.float32)[None, :]
    # A query that sees no key reads zero.
    acc = tl.where((total == 0)[:, None], 0.0, acc / tl.where(total == 0, 1.0, total)[:, None])
    here = out + (n * G + rows)[:, None] * E + wide[None, :]
    tl.store(here, acc.to(out.dtype.element_ty), mask=(rows < G)[:, None] & (wide < E)[None, :])
