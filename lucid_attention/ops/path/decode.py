"""One new token of PaTH or LUCID-PaTH against a cache.

A new token moves every cached key by its Householder factor. Moving them would read and write all keys for every token.
Instead the product M of the factors is pending for the cached keys and is applied to the few rows that meet them:
(M k)ᵀ q = kᵀ (Mᵀ q). Only the keys of the tokens since then, the live ones, are moved with every token. Every
`APPLY_EVERY` tokens, `factors.apply_factors` moves all keys, which then costs next to nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..dispatch import decodes_by_triton
from ..precision import no_autocast, working_dtype
from ..softmax import fused_step
from ..softmax.one_token import Token, cache_product, checked_token, finish_step, groups_of
from . import triton_decode

# Tokens between two moves of all keys.
APPLY_EVERY = 256


class PathDecoded(NamedTuple):
    """What one token gives.

    o: [B, H·G, 1, E], the output; y: [B, H, 1, E], to be written behind `y_past`; live: [B, H, S + 1 − pending, D], the
    live keys and the new one; product: [B, H, D, D], for the next token. Both are in at least float32.
    """

    o: Tensor
    y: Tensor
    live: Tensor
    product: Tensor


def path_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    y_past: Tensor,
    product: Tensor,
    pending: int,
    *,
    live: Tensor | None = None,
    inverse_norms: Tensor | None = None,
    key_mask: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> PathDecoded:
    """PaTH attention of one new token, LUCID-PaTH if `inverse_norms` are given. No gradients.

    Args:
        q: [B, H·G, 1, D], the new query.
        k: [B, H, S + 1, D], cached keys with the new one at the end: the first `pending` without the factors in
            `product`, the live ones after them with all factors so far.
        v: [B, H, 1, E], the new value.
        w, beta: [B, H, 1, D] and [B, H, 1], of the new token.
        y_past: [B, H, S, E], cached values, preconditioned ones for LUCID-PaTH. Finite everywhere.
        product: [B, H, D, D], of the pending factors, `identity_factors` at first.
        pending: how many keys the product is pending for.
        live: [B, H, S − pending, D], the live keys as the step before returned them, in place of those in k. Written
            into a 16-bit cache, live keys would be rounded with every token.
        inverse_norms: [B, H, S + 1], `inverse_key_norms` of the keys before they were moved.
        key_mask: [B, S + 1]. A masked new token moves nothing, is stored as zero and reads zero.
        sharpness, scale: as in `lucid_path_attention`.
        impl: as in `lucid_decode`.
    """
    token = checked_token(
        q, k, v, y_past, inverse_norms=inverse_norms, key_mask=key_mask, sharpness=sharpness, scale=scale
    )
    B, H, total, D = k.shape
    checks.check_factors(k[:, :, -1:], w, beta)
    checks.check_heads_first("product", product, "[B, H, D, D]")
    checks.check_shape("product", product, (B, H, D, D), "[B, H, D, D]")
    checks.check_device("product", product, k)
    if not isinstance(pending, int) or isinstance(pending, bool) or not 0 <= pending < total:
        raise ValueError(f"pending must be an integer in [0, S] = [0, {total - 1}], got {pending!r}")
    if live is not None:
        checks.check_tensor("live", live)
        checks.check_float("live", live)
        checks.check_shape("live", live, (B, H, total - 1 - pending, D), "[B, H, S − pending, D]")
        checks.check_device("live", live, k)
    with torch.no_grad(), no_autocast(k):
        live = k[:, :, pending:-1] if live is None else live
        if decodes_by_triton(impl, k.device, lambda: triton_decode.obstacle(token, product)):
            return PathDecoded(*triton_decode.decode(token, w, beta, product, pending, live))
        return _decode(token, w, beta, product, pending, live, fused_step.chosen(impl, token))


def _decode(
    token: Token, w: Tensor, beta: Tensor, product: Tensor, pending: int, live: Tensor, fused: bool
) -> PathDecoded:
    (B, H, total, D), key_mask, c = token.k.shape, token.key_mask, token.sharpness
    n, G, wide = B * H, groups_of(token), working_dtype(token.k)
    keys, queries = token.k.flatten(0, 1), token.q.reshape(n, G, D).to(wide)
    new, w, beta = keys[:, -1:].to(wide), w.reshape(n, 1, D).to(wide), beta.reshape(n, 1, 1).to(wide)
    if key_mask is not None:
        masked = ~key_mask[:, -1:].repeat_interleave(H, 0)[:, None]
        queries, new, w, beta = (x.masked_fill(masked, 0) for x in (queries, new, w, beta))
    factor = beta * w
    product = product.flatten(0, 1).to(wide)
    product = torch.baddbmm(product, factor.mT, torch.bmm(w, product), alpha=-1)
    moved = live.flatten(0, 1).to(wide)
    moved = torch.cat([torch.baddbmm(moved, torch.bmm(moved, w.mT), factor, alpha=-1), new], 1)

    rows, inverse = queries * token.scale, None
    if token.inverse_norms is not None:
        inverse = token.inverse_norms.reshape(n, 1, total).to(wide)
        rows = torch.cat([rows, new * (c * inverse[:, :, -1:])], 1)
    moving = torch.bmm(rows, product)
    if fused:
        step = fused_step.run(token, pending, (moving, rows.contiguous()), moved)
    else:
        # As if the product were pending for all keys. Overwriting the live keys' scores is cheaper than joining parts.
        scores = cache_product(moving, keys.mT)
        scores[:, :, pending:] = torch.bmm(rows, moved.mT)
        if inverse is not None:
            scores[:, G:].mul_(inverse)
            scores[:, G:, -1:] = c  # exactly, also for a zero key
        step = finish_step(scores, token)
    o, y = step
    if key_mask is not None:
        o = o.masked_fill(~key_mask[:, -1:, None, None], 0)
    return PathDecoded(o, y, moved.view(B, H, -1, D), product.view(B, H, D, D))
