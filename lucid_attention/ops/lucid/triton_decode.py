"""One decoding step by two Triton kernels: K and Y are each read once, for the queries and the new key's row of P.

`step_split_kernel` gives every program a part of the cache (split-K), `step_combine_kernel` combines the parts,
computes y of the new token, writes it, and reads it. The cache is [B, H, places, *] in any strides or, if PAGE is not
0, pages: `table` [B, pages] has the page of every PAGE tokens. The new key is in the cache at place `count`, the number
of keys before it, which is an argument or read from the device (COUNTED).

Rows of a program's tile: G queries of a key/value head, then its new key, then padding.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..softmax.one_token import Token, groups_of
from ..triton_tiles import (
    LOG2_E,
    Tile,
    architecture,
    combine_splits,
    on_device,
    padded_size,
    precisions,
    registers,
    softmax_step,
    splits_of,
    stride_unit,
)

# Of float32 keys: a step waits for memory, and pieces of a wide head for tensor cores would spill registers.
STEP_PRECISION = "ieee"


def step_tile(architecture: str, dtype: torch.dtype, features: int, values: int) -> Tile:
    """The tile of a decoding step: `cols` keys at a time."""
    wide = dtype != torch.bfloat16 or max(features, values) > 128
    return Tile(16, 16 if wide else 32, values, features)


class StepTensors(NamedTuple):
    """What both kernels read, and what the first one writes for the second. Absent tensors are never read.

    q: [B, H·G, 1, D], contiguous; k, norms: the cache; mask: [B, places]; table: [B, pages]; counts: [B] or [1];
    sharpness: [n]; maxima, sums: [n, splits, ROWS] and parts: [n, splits, ROWS, VALUES], of `softmax_step`.
    scale: of the scores of q; strength: s.
    """

    q: Tensor
    k: Tensor
    norms: Tensor
    mask: Tensor
    table: Tensor
    counts: Tensor
    sharpness: Tensor
    maxima: Tensor
    sums: Tensor
    parts: Tensor
    scale: float
    strength: float


class StepConstants(NamedTuple):
    """What the kernels are compiled for. FEATURES, VALUES: padded D and E. WIDTH: of E, combined by one program.

    UNIT: the strides of k and y are multiples of it.
    """

    G: int
    D: int
    FEATURES: int
    E: int
    VALUES: int
    WIDTH: int
    ROWS: int
    COLUMNS: int
    PAGE: int
    UNIT: int
    COUNTED: bool
    IN_PLACE: bool
    MASKED: bool
    QK: bool
    BETA: bool
    PRECISION: str
    PRODUCT: str


@triton.jit
def places(
    cache, table, strides, stride_table, batch, head, tokens, inside, PAGE: tl.constexpr, UNIT: tl.constexpr = 1
):
    """Pointers to the rows of a cache for positions [N] of a sequence.

    strides: of batch or pages, heads and places, in multiples of UNIT.
    """
    start = cache + head * strides[1] * UNIT
    if PAGE:
        pages = tl.load(table + batch * stride_table + tokens // PAGE, mask=inside, other=0).to(tl.int64)
        return start + pages * strides[0] * UNIT + (tokens % PAGE) * strides[2] * UNIT
    return start + batch * strides[0] * UNIT + tokens.to(tl.int64) * strides[2] * UNIT


@triton.jit
def new_rows(step, k_strides, n_strides, stride_table, n, batch, head, count, hidden, CONST: tl.constexpr):
    """The rows [ROWS, FEATURES] in float32: the queries, then the new key times a power of two that brings it near 1.

    Also that power, 1/‖k‖ of the new key, and what the products of the rows with keys are multiplied with to be
    exponents of 2: [ROWS]. Infinities and NaN of a hidden token are zero.
    """
    rows = tl.arange(0, CONST.ROWS)
    features = tl.arange(0, CONST.FEATURES)[None, :]
    here = (rows < CONST.G)[:, None] & (features < CONST.D)
    x = tl.load(step.q + (n * CONST.G + rows)[:, None] * CONST.D + features, mask=here, other=0.0).to(tl.float32)
    one = tl.zeros((1,), tl.int32) + count
    new = places(step.k, step.table, k_strides, stride_table, batch, head, one, one >= 0, CONST.PAGE, CONST.UNIT)
    key = tl.load(new[:, None] + features, mask=features < CONST.D, other=0.0).to(tl.float32)
    x = tl.where((tl.abs(x) < float("inf")) | (hidden == 0), x, 0.0)
    key = tl.where((tl.abs(key) < float("inf")) | (hidden == 0), key, 0.0)
    exponent = (tl.max(tl.abs(key)).to(tl.int32, bitcast=True) >> 23) & 255
    # Cached keys are not scaled: this one is, so small that no product overflows. Float16 cannot, but is coarse there.
    middle = 262 if step.k.dtype.element_ty == tl.float16 else 246
    power = (tl.minimum(tl.maximum(middle - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    x = tl.where((rows == CONST.G)[:, None], key * power, x)
    own = places(step.norms, step.table, n_strides, stride_table, batch, head, one, one >= 0, CONST.PAGE)
    inverse = tl.sum(tl.load(own).to(tl.float32))
    queries = tl.zeros((CONST.ROWS,), tl.float32) + step.scale
    if CONST.QK:
        largest = tl.max(tl.abs(x), 1)
        part = x / tl.where(largest > 0, largest, 1.0)[:, None]
        length = largest * tl.sqrt_rn(tl.sum(part * part, 1))
        queries *= tl.where(length > 0, CONST.D / tl.where(length > 0, length, 1.0), 0.0)
    c = tl.load(step.sharpness + n)
    factors = tl.where(rows == CONST.G, c * inverse / power, queries) * LOG2_E
    return x, power, inverse, factors


COUNTS = ["H", "count", "splits", "stride_mask", "stride_table", "stride_counts"]
STRIDES = [f"{name}_stride_{letter}" for name in "kny" for letter in "bht"]


@triton.jit(do_not_specialize=COUNTS + STRIDES)
def step_split_kernel(
    step, y, H, count, splits, stride_mask, stride_table, stride_counts,
    k_stride_b, k_stride_h, k_stride_t, n_stride_b, n_stride_h, n_stride_t, y_stride_b, y_stride_h, y_stride_t,
    CONST: tl.constexpr,
):  # fmt: skip
    """Maxima and sums of the exponentials, [n, splits, ROWS], and their products with Y, [n, splits, ROWS, VALUES]."""
    pid = tl.program_id(0)
    n = (pid // splits).to(tl.int64)
    split = pid % splits
    batch, head = n // H, n % H
    k_strides, n_strides = (k_stride_b, k_stride_h, k_stride_t), (n_stride_b, n_stride_h, n_stride_t)
    y_strides = (y_stride_b, y_stride_h, y_stride_t)
    if CONST.COUNTED:
        count = tl.load(step.counts + batch * stride_counts).to(tl.int32)
    hidden = 0
    if CONST.MASKED:
        hidden = 1 - tl.load(step.mask + batch * stride_mask + count).to(tl.int32)
    x, _, _, factors = new_rows(step, k_strides, n_strides, stride_table, n, batch, head, count, hidden, CONST)
    rows = tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.COLUMNS)
    features = tl.arange(0, CONST.FEATURES)
    wide = tl.arange(0, CONST.VALUES)
    is_key = (rows == CONST.G)[:, None]
    factors = factors[:, None]
    shift = tl.where(is_key, tl.load(step.sharpness + n) * LOG2_E, 0.0)
    x = x.to(step.k.dtype.element_ty)
    top = tl.where(rows == CONST.G, 0.0, float("-inf"))
    total = tl.zeros((CONST.ROWS,), tl.float32)
    acc = tl.zeros((CONST.ROWS, CONST.VALUES), tl.float32)
    per = tl.cdiv(tl.cdiv(count, splits), CONST.COLUMNS) * CONST.COLUMNS
    for start in range(split * per, tl.minimum((split + 1) * per, count), CONST.COLUMNS):
        tokens = start + columns
        seen = tokens < count
        if CONST.MASKED:
            seen &= tl.load(step.mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        there = places(step.k, step.table, k_strides, stride_table, batch, head, tokens, seen, CONST.PAGE, CONST.UNIT)
        mask = seen[None, :] & (features < CONST.D)[:, None]
        keys = tl.load(there[None, :] + features[:, None], mask=mask, other=0.0)
        scores = tl.dot(x, keys, input_precision=CONST.PRECISION) * factors
        there = places(step.norms, step.table, n_strides, stride_table, batch, head, tokens, seen, CONST.PAGE)
        inverse = tl.load(there, mask=seen, other=0.0).to(tl.float32)[None, :]
        scores *= inverse if CONST.QK else tl.where(is_key, inverse, 1.0)
        scores = tl.where(seen[None, :], scores - shift, float("-inf"))
        there = places(y, step.table, y_strides, stride_table, batch, head, tokens, seen, CONST.PAGE, CONST.UNIT)
        mask = seen[:, None] & (wide < CONST.E)[None, :]
        values = tl.load(there[:, None] + wide[None, :], mask=mask, other=0.0)
        top, total, acc = softmax_step(scores, values, top, total, acc, rows == CONST.G, CONST.PRODUCT)
    here = (n * splits + split) * CONST.ROWS + rows
    tl.store(step.maxima + here, top)
    tl.store(step.sums + here, total)
    tl.store(step.parts + here[:, None] * CONST.VALUES + wide[None, :], acc)


@triton.jit(do_not_specialize=COUNTS + STRIDES)
def step_combine_kernel(
    step, y, v, beta, out, H, count, splits, stride_mask, stride_table, stride_counts,
    k_stride_b, k_stride_h, k_stride_t, n_stride_b, n_stride_h, n_stride_t, y_stride_b, y_stride_h, y_stride_t,
    CONST: tl.constexpr,
):  # fmt: skip
    """y = β (v − s Σ P y) to place `count` of `y` (IN_PLACE) or to place 0, and `out` [n, G, E], which reads it.

    v: [n, E]; beta: [n].
    """
    n = tl.program_id(0).to(tl.int64)
    batch, head = n // H, n % H
    k_strides, n_strides = (k_stride_b, k_stride_h, k_stride_t), (n_stride_b, n_stride_h, n_stride_t)
    y_strides = (y_stride_b, y_stride_h, y_stride_t)
    if CONST.COUNTED:
        count = tl.load(step.counts + batch * stride_counts).to(tl.int32)
    hidden = 0
    if CONST.MASKED:
        hidden = 1 - tl.load(step.mask + batch * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, CONST.ROWS)
    wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    top, total, acc = combine_splits(
        step.maxima, step.sums, step.parts, n, splits, wide, CONST.ROWS, CONST.VALUES, CONST.WIDTH
    )
    solved = tl.sum(tl.where((rows == CONST.G)[:, None], acc, 0.0), 0)
    new = tl.load(v + n * CONST.E + wide, mask=wide < CONST.E, other=0.0).to(tl.float32)
    new -= step.strength * solved
    if CONST.BETA:
        new *= tl.load(beta + n)
    new = tl.where(hidden == 0, new, 0.0).to(y.dtype.element_ty)
    one = tl.zeros((1,), tl.int32) + (count if CONST.IN_PLACE else 0)
    there = places(y, step.table, y_strides, stride_table, batch, head, one, one >= 0, CONST.PAGE, CONST.UNIT)
    tl.store(there[:, None] + wide[None, :], new[None, :], mask=(wide < CONST.E)[None, :])
    # The new key among the keys that the queries read.
    x, power, inverse, factors = new_rows(
        step, k_strides, n_strides, stride_table, n, batch, head, count, hidden, CONST
    )
    key = tl.sum(tl.where((rows == CONST.G)[:, None], x, 0.0), 0) / power
    score = tl.sum(x * key[None, :], 1) * factors
    if CONST.QK:
        score *= inverse
    score = tl.where(hidden == 0, score, float("-inf"))
    highest = tl.maximum(top, score)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    shrink, weight = tl.exp2(top - finite), tl.exp2(score - finite)
    total = total * shrink + weight
    acc = acc * shrink[:, None] + weight[:, None] * new.to(tl.float32)[None, :]
    # A query that sees no key reads zero.
    acc = tl.where((total == 0)[:, None], 0.0, acc / tl.where(total == 0, 1.0, total)[:, None])
    here = out + (n * CONST.G + rows)[:, None] * CONST.E + wide[None, :]
    tl.store(here, acc.to(out.dtype.element_ty), mask=(rows < CONST.G)[:, None] & (wide < CONST.E)[None, :])


def step(token: Token, y: Tensor, o: Tensor, table: Tensor | None = None) -> None:
    """Write o [B, H·G, 1, E], contiguous, and y: its place in the cache if y is `token.y_past`, else [B, H, 1, E].

    The caches of the token are [B, H, places, *], or [pages, H, page size, *] with `table` [B, P]. `token.position` has
    the number of keys before the new one, for all or per sequence; None: all of the cache but its last place.
    """
    in_place, counts, norms = y is token.y_past, token.position, token.inverse_norms
    assert norms is not None
    q, v = token.q.contiguous(), token.v.contiguous()
    k, y_past = (x if x.stride(-1) == 1 else x.contiguous() for x in (token.k, token.y_past))
    B, H, D, E = q.shape[0], k.shape[1], k.shape[3], v.shape[3]
    n, G = B * H, groups_of(token)
    features, values, rows = padded_size(D), padded_size(E), padded_size(G + 1)
    where = architecture(k.device)
    multiply, tile = precisions(where, k.dtype), step_tile(where, k.dtype, features, values)
    page, unit = 0 if table is None else k.shape[2], stride_unit(k, y_past, y)
    splits = splits_of(n, k.shape[2] if table is None else table.shape[1] * page)
    maxima, sums = (q.new_empty(n, splits, rows, dtype=torch.float32) for _ in range(2))
    parts = q.new_empty(n, splits, rows, values, dtype=torch.float32)
    c = token.sharpness
    c = c.reshape(n).float() if isinstance(c, Tensor) else q.new_full((n,), c, dtype=torch.float32)
    mask = token.key_mask
    if mask is not None:
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
    mask_or, table_or, counts_or = (q if x is None else x for x in (mask, table, counts))
    beta = c if token.beta is None else token.beta.reshape(n).float().contiguous()
    tensors = StepTensors(
        q, k, norms, mask_or, table_or, counts_or, c, maxima, sums, parts, token.scale, token.strength
    )
    const = StepConstants(
        G=G, D=D, FEATURES=features, E=E, VALUES=values, WIDTH=min(64, values), ROWS=rows, COLUMNS=tile.cols, PAGE=page,
        UNIT=unit, COUNTED=counts is not None, IN_PLACE=in_place, MASKED=mask is not None, QK=token.norm == "qk",
        BETA=token.beta is not None, PRECISION=STEP_PRECISION, PRODUCT=multiply.values,
    )  # fmt: skip
    count = 0 if counts is not None else k.shape[2] - 1
    numbers = (
        H, count, splits, 0 if mask is None else mask.stride(0), 0 if table is None else table.stride(0),
        0 if counts is None or counts.numel() == 1 else counts.stride(0), *_in_units(k, unit), *norms.stride()[:3],
    )  # fmt: skip
    options = {"CONST": const, "num_warps": tile.warps, "num_stages": tile.stages}
    with on_device(k):
        step_split_kernel[(n * splits,)](
            tensors, y_past, *numbers, *_in_units(y_past, unit), **options, **registers(step_split_kernel, k.device)
        )
        step_combine_kernel[(n, values // const.WIDTH)](
            tensors, y, v, beta, o, *numbers, *_in_units(y, unit), **options, **registers(step_combine_kernel, k.device)
        )


def _in_units(x: Tensor, unit: int) -> list[int]:
    return [stride // unit for stride in x.stride()[:3]]
