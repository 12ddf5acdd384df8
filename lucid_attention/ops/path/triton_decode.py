"""One decoding step of PaTH and LUCID-PaTH by Triton kernels: three launches, independent of the data.

`path_step_prepare_kernel` brings the pending product and the live keys up to the new token, and applies the product to
the rows that meet the cached keys. `path_step_split_kernel` reads K and Y once, each program a part of them (split-K).
`path_step_combine_kernel` merges the parts, makes y of the new token, and reads it.

Rows of a head: G queries and, with a solve, its new key, then padding. Head sizes are padded to powers of two in the
float32 buffers between the kernels.
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
    exact_dot,
    on_device,
    padded_size,
    precisions,
    registers,
    softmax_step,
    splits_of,
    stride_unit,
)
from .decode import PathDecoded


def path_step_tile(values: int) -> Tile:
    """`cols` keys at a time, in pieces of `keys` features. values: the padded head size."""
    return Tile(16, 32 if values <= 128 else 16, values, 32)


class StepConstants(NamedTuple):
    """What the kernels are compiled for.

    FEATURES, VALUES: padded D and E; WIDTH: of E, combined by one program; COLUMNS: keys of a tile; PIECE: of D,
    multiplied at a time; UNIT: of the strides of k and y; PRECISION, PRODUCT: of products with keys and with values.
    """

    G: int
    D: int
    FEATURES: int
    E: int
    VALUES: int
    WIDTH: int
    ROWS: int
    COLUMNS: int
    PIECE: int
    UNIT: int
    SOLVES: bool
    MASKED: bool
    PRECISION: str
    PRODUCT: str


def step(token: Token, w: Tensor, beta: Tensor, product: Tensor, live: Tensor, pending: int, out: PathDecoded) -> None:
    """Write the outputs of one token, contiguous tensors. live: [B, H, L, D], the live keys before it."""
    q, k, v, y_past, norms = token.q, token.k, token.v, token.y_past, token.inverse_norms
    (_, H, total, D), E, n, solves = k.shape, v.shape[3], k.shape[0] * k.shape[1], norms is not None
    k, y_past, live = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, y_past, live))
    w, beta, product, v, q = (x.contiguous() for x in (w, beta, product, v, q))
    G = groups_of(token)
    features, values, rows = padded_size(D), padded_size(E), padded_size(G + solves)
    where = architecture(k.device)
    multiply, tile = precisions(where, k.dtype), path_step_tile(values)
    splits, unit = splits_of(n, total), stride_unit(k, y_past)
    buffer = [q.new_empty(n, rows, features, dtype=torch.float32) for _ in range(2)]
    maxima, sums = (q.new_empty(n, splits, rows, dtype=torch.float32) for _ in range(2))
    parts = q.new_empty(n, splits, rows, values, dtype=torch.float32)
    c = token.sharpness
    c = c.reshape(n).float() if isinstance(c, Tensor) else maxima.new_full((n,), c)
    mask = token.key_mask
    if mask is not None:
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
    # Arguments that are absent are never read.
    mask_or, norms_or = (q if x is None else x for x in (mask, norms))
    numbers = {
        "H": H, "count": total - 1, "live_count": live.shape[2], "stride_mask": 0 if mask is None else mask.stride(0),
    }  # fmt: skip
    strides = {
        **{f"k_stride_{letter}": k.stride(i) // unit for i, letter in enumerate("bht")},
        **{f"n_stride_{letter}": 0 if norms is None else norms.stride(i) for i, letter in enumerate("bht")},
    }  # fmt: skip
    constants = StepConstants(
        G=G, D=D, FEATURES=features, E=E, VALUES=values, WIDTH=min(64, values), ROWS=rows, COLUMNS=tile.cols,
        PIECE=min(tile.keys, features), UNIT=unit, SOLVES=solves, MASKED=mask is not None, PRECISION=multiply.keys,
        PRODUCT=multiply.values,
    )  # fmt: skip
    options = {"CONST": constants, "num_warps": tile.warps, "num_stages": tile.stages}
    with on_device(k):
        path_step_prepare_kernel[(n, features // constants.PIECE)](
            q, k, w, beta, product, live, norms_or, mask_or, c, *buffer, out.product, out.live, **numbers, **strides,
            live_stride_b=live.stride(0), live_stride_h=live.stride(1), live_stride_t=live.stride(2),
            scale=token.scale, **options, **registers(path_step_prepare_kernel, k.device),
        )  # fmt: skip
        path_step_split_kernel[(n * splits,)](
            *buffer, out.live, k, y_past, norms_or, mask_or, c, maxima, sums, parts, **numbers, **strides,
            **{f"y_stride_{letter}": y_past.stride(i) // unit for i, letter in enumerate("bht")}, pending=pending,
            splits=splits, **options, **registers(path_step_split_kernel, k.device),
        )  # fmt: skip
        path_step_combine_kernel[(n, values // constants.WIDTH)](
            buffer[0], out.live, v, mask_or, maxima, sums, parts, out.y, out.o, **numbers, splits=splits, **options,
            **registers(path_step_combine_kernel, k.device),
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "H", "count", "live_count", "k_stride_b", "k_stride_h", "k_stride_t", "live_stride_b", "live_stride_h",
        "live_stride_t", "n_stride_b", "n_stride_h", "n_stride_t", "stride_mask",
    ],
    do_not_specialize_on_alignment=["k", "live_keys", "norms", "mask"],
)  # fmt: skip
def path_step_prepare_kernel(
    q, k, w, beta, product, live_keys, norms, mask, sharpness, rows_out, moving_out, product_out, moved_out, H, count,
    live_count, k_stride_b, k_stride_h, k_stride_t, live_stride_b, live_stride_h, live_stride_t, n_stride_b, n_stride_h,
    n_stride_t, stride_mask, scale, CONST: tl.constexpr,
):  # fmt: skip
    """product ← product − β w (wᵀ product), [n, D, D]; rows and rows · product, [n, ROWS, FEATURES]; live keys moved
    and the new one after them, [n, live_count + 1, D]. A program makes PIECE columns of each.

    q: [n, G, D], w: [n, D], beta: [n], product: [n, D, D], contiguous. norms: 1/‖k‖ of the keys.
    """
    D: tl.constexpr = CONST.D
    n = tl.program_id(0).to(tl.int64)
    batch, head = n // H, n % H
    hidden = tl.zeros((1,), tl.int32)
    if CONST.MASKED:
        hidden += 1 - tl.load(mask + batch * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, CONST.ROWS)[:, None]
    columns = tl.program_id(1) * CONST.PIECE + tl.arange(0, CONST.PIECE)
    features = tl.arange(0, CONST.FEATURES)
    shown = hidden == 0
    b = tl.where(shown, tl.load(beta + n).to(tl.float32), 0.0)
    here = (columns < D) & shown
    w_here = tl.load(w + n * D + columns, mask=here, other=0.0).to(tl.float32)
    new = k + (batch * k_stride_b + head * k_stride_h + count.to(tl.int64) * k_stride_t) * CONST.UNIT
    factor = 0.0
    if CONST.SOLVES:
        own = norms + batch * n_stride_b + head * n_stride_h + count.to(tl.int64) * n_stride_t
        factor = tl.load(sharpness + n) * tl.load(own).to(tl.float32)
    along = tl.zeros((CONST.PIECE,), tl.float32)
    for i in range(0, CONST.FEATURES, CONST.PIECE):
        deep = i + tl.arange(0, CONST.PIECE)
        inside = (deep < D)[:, None] & (columns < D)[None, :]
        m = tl.load(product + n * (D * D) + deep[:, None] * D + columns[None, :], mask=inside, other=0.0)
        w_deep = tl.load(w + n * D + deep, mask=(deep < D) & shown, other=0.0).to(tl.float32)
        along += tl.sum(m.to(tl.float32) * w_deep[:, None], 0)
    moving = tl.zeros((CONST.ROWS, CONST.PIECE), tl.float32)
    for i in range(0, CONST.FEATURES, CONST.PIECE):
        deep = i + tl.arange(0, CONST.PIECE)
        inside = (deep < D)[:, None] & (columns < D)[None, :]
        there = n * (D * D) + deep[:, None] * D + columns[None, :]
        w_deep = tl.load(w + n * D + deep, mask=(deep < D) & shown, other=0.0).to(tl.float32)
        m = tl.load(product + there, mask=inside, other=0.0).to(tl.float32) - (b * w_deep)[:, None] * along[None, :]
        tl.store(product_out + there, m, mask=inside)
        seen = (rows < CONST.G) & (deep < D)[None, :] & shown
        x = tl.load(q + (n * CONST.G + rows) * D + deep[None, :], mask=seen, other=0.0).to(tl.float32) * scale
        if CONST.SOLVES:
            key = tl.load(new + deep, mask=(deep < D) & shown, other=0.0).to(tl.float32)
            x = tl.where(rows == CONST.G, (key * factor)[None, :], x)
        if tl.program_id(1) == 0:
            tl.store(rows_out + (n * CONST.ROWS + rows) * CONST.FEATURES + deep[None, :], x)
        moving = tl.dot(x, m, moving, input_precision=CONST.PRECISION)
    tl.store(moving_out + (n * CONST.ROWS + rows) * CONST.FEATURES + columns[None, :], moving)
    w_whole = tl.load(w + n * D + features, mask=(features < D) & shown, other=0.0).to(tl.float32)
    start = live_keys + batch * live_stride_b + head * live_stride_h
    for j in range(0, live_count, CONST.PIECE):
        tokens = j + tl.arange(0, CONST.PIECE)
        from_here = start + tokens.to(tl.int64)[:, None] * live_stride_t
        inside = (tokens < live_count)[:, None]
        x = tl.load(from_here + features[None, :], mask=inside & (features < D)[None, :], other=0.0).to(tl.float32)
        piece = tl.load(from_here + columns[None, :], mask=inside & (columns < D)[None, :], other=0.0).to(tl.float32)
        piece -= (b * tl.sum(x * w_whole[None, :], 1))[:, None] * w_here[None, :]
        to = moved_out + (n * (live_count + 1) + tokens)[:, None] * D + columns[None, :]
        tl.store(to, piece, mask=inside & (columns < D)[None, :])
    key = tl.load(new + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(moved_out + (n * (live_count + 1) + live_count) * D + columns, key, mask=columns < D)


@triton.jit
def read_keys(
    x, keys, key_stride, first, y, y_stride, norms, norm_stride, tokens, seen, top, total, acc, c, CONST: tl.constexpr
):
    """Add tokens [COLUMNS] to maxima, sums and products with values.

    x: rows [ROWS, FEATURES]; keys: of the tokens from `first` on.
    """
    rows = tl.arange(0, CONST.ROWS)
    scores = tl.zeros((CONST.ROWS, CONST.COLUMNS), tl.float32)
    for i in range(0, CONST.FEATURES, CONST.PIECE):
        deep = i + tl.arange(0, CONST.PIECE)
        left = tl.load(x + rows[:, None] * CONST.FEATURES + deep[None, :])
        there = keys + (tokens - first)[None, :] * key_stride + deep[:, None]
        right = tl.load(there, mask=seen[None, :] & (deep < CONST.D)[:, None], other=0.0)
        # The range of float16 is too small for the rows.
        right = right.to(tl.float32) if right.dtype == tl.float16 else right
        scores = exact_dot(left, right, scores, CONST.PRECISION)
    is_key = (rows == CONST.G) & CONST.SOLVES
    if CONST.SOLVES:
        inverse = tl.load(norms + tokens * norm_stride, mask=seen, other=0.0).to(tl.float32)
        scores = tl.where(is_key[:, None], scores * inverse[None, :] - c, scores)
    scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
    wide = tl.arange(0, CONST.VALUES)[None, :]
    values = tl.load(y + tokens[:, None] * y_stride + wide, mask=seen[:, None] & (wide < CONST.E), other=0.0)
    return softmax_step(scores, values, top, total, acc, is_key, CONST.PRODUCT)


@triton.jit(
    do_not_specialize=[
        "H", "count", "pending", "live_count", "splits", "k_stride_b", "k_stride_h", "k_stride_t", "y_stride_b",
        "y_stride_h", "y_stride_t", "n_stride_b", "n_stride_h", "n_stride_t", "stride_mask",
    ]
)  # fmt: skip
def path_step_split_kernel(
    rows_in, moving_in, moved, k, y, norms, mask, sharpness, maxima, sums, parts, H, count, pending, live_count, splits,
    k_stride_b, k_stride_h, k_stride_t, y_stride_b, y_stride_h, y_stride_t, n_stride_b, n_stride_h, n_stride_t,
    stride_mask, CONST: tl.constexpr,
):  # fmt: skip
    """Maxima and sums of the exponentials, [n, splits, ROWS], and their products with Y, [n, splits, ROWS, VALUES].

    The first `pending` keys are read from the cache, by the moved rows; the live ones from `moved`, by the rows.
    """
    pid = tl.program_id(0)
    n = (pid // splits).to(tl.int64)
    split = pid % splits
    batch, head = n // H, n % H
    rows = tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.COLUMNS)
    wide = tl.arange(0, CONST.VALUES)
    c = 0.0
    top = tl.full((CONST.ROWS,), float("-inf"), tl.float32)
    if CONST.SOLVES:
        c = tl.load(sharpness + n)
        top = tl.where(rows == CONST.G, 0.0, top)
    total = tl.zeros((CONST.ROWS,), tl.float32)
    acc = tl.zeros((CONST.ROWS, CONST.VALUES), tl.float32)
    per = tl.cdiv(tl.cdiv(count, splits), CONST.COLUMNS) * CONST.COLUMNS
    low = split * per
    high = tl.minimum(low + per, count)
    k += (batch * k_stride_b + head * k_stride_h) * CONST.UNIT
    y += (batch * y_stride_b + head * y_stride_h) * CONST.UNIT
    k_stride_t *= CONST.UNIT
    y_stride_t *= CONST.UNIT
    norms += batch * n_stride_b + head * n_stride_h
    moved += n * (live_count + 1) * CONST.D
    rows_in += n * (CONST.ROWS * CONST.FEATURES)
    moving_in += n * (CONST.ROWS * CONST.FEATURES)
    end = tl.minimum(high, pending)
    for start in range(low, end, CONST.COLUMNS):
        tokens = (start + columns).to(tl.int64)
        seen = tokens < end
        if CONST.MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        top, total, acc = read_keys(
            moving_in, k, k_stride_t, 0, y, y_stride_t, norms, n_stride_t, tokens, seen, top, total, acc, c, CONST
        )  # fmt: skip
    for start in range(tl.maximum(low, pending), high, CONST.COLUMNS):
        tokens = (start + columns).to(tl.int64)
        seen = tokens < high
        if CONST.MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        top, total, acc = read_keys(
            rows_in, moved, CONST.D, pending, y, y_stride_t, norms, n_stride_t, tokens, seen, top, total, acc, c, CONST
        )  # fmt: skip
    here = (n * splits + split) * CONST.ROWS + rows
    tl.store(maxima + here, top)
    tl.store(sums + here, total)
    tl.store(parts + here[:, None] * CONST.VALUES + wide[None, :], acc)


@triton.jit(do_not_specialize=["H", "count", "live_count", "splits", "stride_mask"])
def path_step_combine_kernel(
    rows_in, moved, v, mask, maxima, sums, parts, y, out, H, count, live_count, splits, stride_mask,
    CONST: tl.constexpr,
):  # fmt: skip
    """y = v − Σ P y, or v, [n, E], and `out` [n, G, E], which reads it. v: [n, E]."""
    n = tl.program_id(0).to(tl.int64)
    hidden = tl.zeros((1,), tl.int32)
    if CONST.MASKED:
        hidden += 1 - tl.load(mask + n // H * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, CONST.ROWS)
    features = tl.arange(0, CONST.FEATURES)
    wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    top, total, acc = combine_splits(maxima, sums, parts, n, splits, wide, CONST.ROWS, CONST.VALUES, CONST.WIDTH)
    new = tl.load(v + n * CONST.E + wide, mask=(wide < CONST.E) & (hidden == 0), other=0.0).to(tl.float32)
    if CONST.SOLVES:
        solved = tl.sum(tl.where((rows == CONST.G)[:, None], acc, 0.0), 0)
        new = tl.where(hidden == 0, new - solved, 0.0)
    stored = new.to(y.dtype.element_ty)
    tl.store(y + n * CONST.E + wide, stored, mask=wide < CONST.E)
    # The new key among the keys that the queries read.
    x = tl.load(rows_in + (n * CONST.ROWS + rows)[:, None] * CONST.FEATURES + features[None, :])
    key = tl.load(moved + (n * (live_count + 1) + live_count) * CONST.D + features, mask=features < CONST.D, other=0.0)
    score = tl.sum(x * key[None, :], 1) * LOG2_E
    highest = tl.maximum(top, score)
    shrink, weight = tl.exp2(top - highest), tl.exp2(score - highest)
    total = total * shrink + weight
    acc = (acc * shrink[:, None] + weight[:, None] * stored.to(tl.float32)[None, :]) / total[:, None]
    acc = tl.where(hidden == 0, acc, 0.0)
    here = out + (n * CONST.G + rows)[:, None] * CONST.E + wide[None, :]
    tl.store(here, acc.to(out.dtype.element_ty), mask=(rows < CONST.G)[:, None] & (wide < CONST.E)[None, :])
