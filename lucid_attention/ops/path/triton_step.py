"""Kernels of one decoding step of PaTH and LUCID-PaTH, and their launches: three, whatever the data.

`path_step_prepare_kernel` brings the pending product and the live keys up to the new token, and applies the product to
the rows that meet the cached keys. `path_step_split_kernel` reads K and Y once, each program a part of them (split-K).
`path_step_combine_kernel` puts the parts together, makes y of the new token, and reads it.

Rows of a head: G queries and, with a solve, its new key, then padding. Sizes of heads are padded to powers of two in
the buffers between the kernels, which are float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..softmax.one_token import Token
from ..triton_tiles import LOG2_E, architecture, on_device, padded_size, precisions, splits_of
from .triton_configs import path_step_tile


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
    hidden = 0
    if MASKED:
        hidden = 1 - tl.load(mask + batch * stride_mask + count).to(tl.int32)
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
def put_into(
    scores,
    inverse,
    seen,
    values,
    top,
    total,
    acc,
    c,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    SOLVES: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """More keys into maxima, sums and products with values. scores: [ROWS, N] of rows with their scale."""
    is_key = tl.arange(0, ROWS) == G
    if SOLVES:
        scores = tl.where(is_key[:, None], scores * inverse[None, :] - c, scores)
    scores = tl.where(seen[None, :], scores * LOG2_E, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    if SOLVES:
        # The largest exponent of the key's row is its own, 0.
        highest = tl.where(is_key, 0.0, highest)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights, values, acc * shrink[:, None], input_precision=PRODUCT)
    return highest, total, acc


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
    features = tl.arange(0, FEATURES)
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
    x = tl.load(moving_in + (n * ROWS + rows)[:, None] * FEATURES + features[None, :])
    for start in range(low, tl.minimum(high, pending), COLUMNS):
        tokens = (start + columns).to(tl.int64)
        seen = tokens < tl.minimum(high, pending)
        if MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        inside = seen[None, :] & (features < D)[:, None]
        keys = tl.load(k + tokens[None, :] * k_stride_t + features[:, None], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(norms + tokens * n_stride_t, mask=seen, other=0.0).to(tl.float32) if SOLVES else total
        inside = seen[:, None] & (wide < E)[None, :]
        values = tl.load(y + tokens[:, None] * y_stride_t + wide[None, :], mask=inside, other=0.0).to(tl.float32)
        scores = tl.dot(x, keys, input_precision=PRECISION)
        top, total, acc = put_into(scores, inverse, seen, values, top, total, acc, c, G, ROWS, SOLVES, PRODUCT)
    x = tl.load(rows_in + (n * ROWS + rows)[:, None] * FEATURES + features[None, :])
    for start in range(tl.maximum(low, pending), high, COLUMNS):
        tokens = (start + columns).to(tl.int64)
        seen = tokens < high
        if MASKED:
            seen &= tl.load(mask + batch * stride_mask + tokens, mask=seen, other=0) != 0
        inside = seen[None, :] & (features < D)[:, None]
        keys = tl.load(moved + (tokens - pending)[None, :] * D + features[:, None], mask=inside, other=0.0)
        inverse = tl.load(norms + tokens * n_stride_t, mask=seen, other=0.0).to(tl.float32) if SOLVES else total
        inside = seen[:, None] & (wide < E)[None, :]
        values = tl.load(y + tokens[:, None] * y_stride_t + wide[None, :], mask=inside, other=0.0).to(tl.float32)
        scores = tl.dot(x, keys, input_precision=PRECISION)
        top, total, acc = put_into(scores, inverse, seen, values, top, total, acc, c, G, ROWS, SOLVES, PRODUCT)
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
    hidden = 0
    if MASKED:
        hidden = 1 - tl.load(mask + n // H * stride_mask + count).to(tl.int32)
    rows = tl.arange(0, ROWS)
    features = tl.arange(0, FEATURES)
    wide = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(splits):
        here = (n * splits + split) * ROWS + rows
        part = tl.load(maxima + here)
        highest = tl.maximum(top, part)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, grow = tl.exp2(top - finite), tl.exp2(part - finite)
        total = total * shrink + tl.load(sums + here) * grow
        acc = acc * shrink[:, None] + tl.load(parts + here[:, None] * VALUES + wide[None, :]) * grow[:, None]
        top = highest
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


@dataclass(frozen=True)
class Made:
    """Contiguous outputs. o: [B, H·G, 1, E]; y: [B, H, 1, E]; live: [B, H, L + 1, D] and product: [B, H, D, D]."""

    o: Tensor
    y: Tensor
    live: Tensor
    product: Tensor


def step(token: Token, w: Tensor, beta: Tensor, product: Tensor, live: Tensor, pending: int, made: Made) -> None:
    """Write the outputs of one token. live: [B, H, L, D], the live keys before it."""
    q, k, v, y_past, norms = token.q, token.k, token.v, token.y_past, token.inverse_norms
    (_, H, total, D), E, n, solves = k.shape, v.shape[3], k.shape[0] * k.shape[1], norms is not None
    k, y_past, live = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, y_past, live))
    w, beta, product, v, q = (x.contiguous() for x in (w, beta, product, v, q))
    G = token.groups
    features, values, rows = padded_size(D), padded_size(E), padded_size(G + solves)
    where = architecture(k.device)
    multiply, tile = precisions(where, k.dtype), path_step_tile(where, features, values)
    splits = splits_of(n, total)
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
    counts = {"H": H, "count": total - 1, "live": live.shape[2], "stride_mask": 0 if mask is None else mask.stride(0)}
    strides = {
        "k_stride_b": k.stride(0), "k_stride_h": k.stride(1), "k_stride_t": k.stride(2),
        **{f"n_stride_{letter}": 0 if norms is None else norms.stride(i) for i, letter in enumerate("bht")},
    }  # fmt: skip
    sizes = {
        "G": G, "D": D, "FEATURES": features, "ROWS": rows, "SOLVES": solves, "MASKED": mask is not None,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    piece, width = min(32, features), min(64, values)
    with on_device(k):
        path_step_prepare_kernel[(n, features // piece)](
            q, k, w, beta, product, live, norms_or, mask_or, c, *buffer, made.product, made.live, **counts, **strides,
            alive_stride_b=live.stride(0), alive_stride_h=live.stride(1), alive_stride_t=live.stride(2),
            scale=token.scale, PIECE=piece, DEPTH=piece, PRECISION=multiply.keys, **sizes,
        )  # fmt: skip
        path_step_split_kernel[(n * splits,)](
            *buffer, made.live, k, y_past, norms_or, mask_or, c, maxima, sums, parts, pending=pending, splits=splits,
            y_stride_b=y_past.stride(0), y_stride_h=y_past.stride(1), y_stride_t=y_past.stride(2), E=E, VALUES=values,
            COLUMNS=tile.cols, PRECISION=multiply.keys, PRODUCT=multiply.values, **counts, **strides, **sizes,
        )  # fmt: skip
        path_step_combine_kernel[(n, values // width)](
            buffer[0], made.live, v, mask_or, maxima, sums, parts, made.y, made.o, splits=splits, E=E, VALUES=values,
            WIDTH=width, **counts, **sizes,
        )  # fmt: skip
