"""One new token of PaTH or LUCID-PaTH against a cache, lazily.

A new token moves every cached key by its Householder factor. Doing so would read and write all keys for every token.
Instead keys wait where they stood at the last flush, and their common product M of factors is applied to the few rows
that meet them: (M k)ᵀ q = kᵀ (Mᵀ q). The keys since the flush are moved live. `flush_keys` moves them all and starts
anew: every 256 tokens it costs next to nothing.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..precision import no_autocast, working_dtype
from ..softmax.one_token import cache_product, finish_step
from ..triangular import spans

# New tokens between two flushes.
FLUSH_EVERY = 256
# Keys moved at a time, so that the moved copy stays in the processor's cache.
FLUSHED_KEYS = 1024


class PathStep(NamedTuple):
    """What one token gives.

    o: [B, H·G, 1, E], the output; y: [B, H, 1, E], to be written behind `y_past`; live: [B, H, S + 1 − flushed, D], the
    keys since the flush and the new one, to be written over theirs or kept beside them; product: [B, H, D, D], for the
    next step. Both are in at least float32.
    """

    o: Tensor
    y: Tensor
    live: Tensor
    product: Tensor


def no_factors(k: Tensor) -> Tensor:
    """The product of no factors, right after a flush: [B, H, D, D] for keys [B, H, *, D], in at least float32."""
    checks.check_heads_first("k", k, "[B, H, N, D]")
    B, H, _, D = k.shape
    return torch.eye(D, dtype=working_dtype(k), device=k.device).repeat(B, H, 1, 1)


def flush_keys(k: Tensor, product: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Keys [B, H, N, D] of the last flush as they stand now, after the factors in product: [B, H, D, D]. No gradients.

    out: where to write them, of the shape and dtype of k; k itself for a cache that is moved in place.
    """
    checks.check_heads_first("k", k, "[B, H, N, D]")
    checks.check_heads_first("product", product, "[B, H, D, D]")
    checks.check_shape("product", product, (*k.shape[:2], k.shape[3], k.shape[3]), "[B, H, D, D]")
    checks.check_device("product", product, k)
    out = torch.empty_like(k) if out is None else out
    checks.check_tensor("out", out)
    checks.check_device("out", out, k)
    checks.check_shape("out", out, tuple(k.shape), "[B, H, N, D]")
    checks.check_same_dtype("out", out, k)
    with torch.no_grad(), no_autocast(k):
        for piece in spans(0, k.shape[2], FLUSHED_KEYS):
            out[:, :, piece] = k[:, :, piece].to(product.dtype) @ product.mT
    return out


def path_decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    y_past: Tensor,
    product: Tensor,
    flushed: int,
    *,
    live: Tensor | None = None,
    scalars: Tensor | None = None,
    key_mask: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
) -> PathStep:
    """PaTH attention of one new token, LUCID-PaTH if `scalars` are given. No gradients.

    Args:
        q: [B, H·G, 1, D], the new query.
        k: [B, H, S + 1, D], cached keys with the new one at the end: the first `flushed` as they stood at the last
            flush, those after it as they stood after the token before.
        v: [B, H, 1, E], the new value.
        w, beta: [B, H, 1, D] and [B, H, 1], of the new token.
        y_past: [B, H, S, E], cached values, preconditioned ones for LUCID-PaTH. Finite everywhere.
        product: [B, H, D, D], of the factors since the last flush, `no_factors` at first.
        flushed: how many keys the product is pending for.
        live: [B, H, S − flushed, D], the keys since the flush as the step before returned them, in place of those in k.
            Written into a 16-bit cache they would be rounded with every token, kept beside it only when flushed.
        scalars: [B, H, S + 1], `key_scalars` of the keys as they came.
        key_mask: [B, S + 1]. A masked new token moves nothing, is stored as zero and reads zero.
        sharpness, scale: as in `lucid_path_attention`.
    """
    _check(q, k, v, w, beta, y_past, product, flushed, scalars, key_mask, sharpness, scale)
    if live is not None:
        checks.check_tensor("live", live)
        checks.check_float("live", live)
        checks.check_shape("live", live, (*k.shape[:2], k.shape[2] - 1 - flushed, k.shape[3]), "[B, H, S − flushed, D]")
        checks.check_device("live", live, k)
    with torch.no_grad(), no_autocast(k):
        live = k[:, :, flushed:-1] if live is None else live
        return _decode(q, k, v, w, beta, y_past, product, flushed, live, scalars, key_mask, sharpness, scale)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    y_past: Tensor,
    product: Tensor,
    flushed: int,
    scalars: Tensor | None,
    key_mask: Tensor | None,
    sharpness: float | Tensor | None,
    scale: float | None,
) -> None:
    checks.check_heads_first("k", k, "[B, H, S + 1, D]")
    checks.check_heads_first("v", v, "[B, H, 1, E]")
    B, H, total, D = k.shape
    new = k[:, :, -1:]
    checks.check_shape("v", v, (B, H, 1, v.shape[3]), "[B, H, 1, E]")
    checks.check_q(q, new)
    checks.check_device("v", v, k)
    checks.check_same_dtype("v", v, k)
    checks.check_factors(new, w, beta)
    checks.check_tensor("y_past", y_past)
    checks.check_float("y_past", y_past)
    checks.check_device("y_past", y_past, k)
    checks.check_same_dtype("y_past", y_past, v, "v")
    checks.check_shape("y_past", y_past, (B, H, total - 1, v.shape[3]), "[B, H, S, E]")
    checks.check_heads_first("product", product, "[B, H, D, D]")
    checks.check_shape("product", product, (B, H, D, D), "[B, H, D, D]")
    checks.check_device("product", product, k)
    if not isinstance(flushed, int) or isinstance(flushed, bool) or not 0 <= flushed < total:
        raise ValueError(f"flushed must be an integer in [0, S] = [0, {total - 1}], got {flushed!r}")
    if scalars is not None:
        checks.check_tensor("scalars", scalars)
        checks.check_float("scalars", scalars)
        checks.check_shape("scalars", scalars, (B, H, total), "[B, H, S + 1]")
        checks.check_device("scalars", scalars, k)
    checks.check_key_mask(key_mask, new, total - 1)
    checks.check_sharpness(sharpness, k)
    checks.check_scale(scale)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    y_past: Tensor,
    product: Tensor,
    flushed: int,
    live: Tensor,
    scalars: Tensor | None,
    key_mask: Tensor | None,
    sharpness: float | Tensor | None,
    scale: float | None,
) -> PathStep:
    B, H, total, D = k.shape
    n, G, wide = B * H, q.shape[1] // H, working_dtype(k)
    scale = D**-0.5 if scale is None else float(scale)
    keys, queries = k.flatten(0, 1), q.reshape(n, G, D).to(wide)
    new, w, beta = keys[:, -1:].to(wide), w.reshape(n, 1, D).to(wide), beta.reshape(n, 1, 1).to(wide)
    if key_mask is not None:
        masked = ~key_mask[:, -1:].repeat_interleave(H, 0)[:, None]
        queries, new, w, beta = (x.masked_fill(masked, 0) for x in (queries, new, w, beta))
    factor = beta * w
    product = product.flatten(0, 1).to(wide)
    product = torch.baddbmm(product, factor.mT, torch.bmm(w, product), alpha=-1)
    moved = live.flatten(0, 1).to(wide)
    moved = torch.cat([torch.baddbmm(moved, torch.bmm(moved, w.mT), factor, alpha=-1), new], 1)

    rows = queries * scale
    c: float | Tensor = math.sqrt(D) if sharpness is None else sharpness
    if scalars is not None:
        c = c.to(wide).repeat(B)[:, None, None] if isinstance(c, Tensor) else c
        scalars = scalars.reshape(n, 1, total).to(wide)
        rows = torch.cat([rows, new * (c * scalars[:, :, -1:])], 1)
    # As if all keys were waiting. Those that are not get theirs anew: cheaper than to put parts together.
    scores = cache_product(torch.bmm(rows, product), keys.mT)
    scores[:, :, flushed:] = torch.bmm(rows, moved.mT)
    if scalars is not None:
        scores[:, G:].mul_(scalars)
        scores[:, G:, -1:] = c  # exactly, also for a zero key
    o, y = finish_step(scores, G, v, y_past, key_mask, dtype=q.dtype, sharpness=c)
    if key_mask is not None:
        o = o.masked_fill(~key_mask[:, -1:, None, None], 0)
    return PathStep(o, y, moved.view(B, H, -1, D), product.view(B, H, D, D))
