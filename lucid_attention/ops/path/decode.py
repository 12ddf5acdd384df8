"""The cache of PaTH, and one new token of PaTH or LUCID-PaTH against it.

Each position moves all keys before it by its Householder factor H = I − β w wᵀ. A cache therefore keeps keys *at the
end*: moved by the factors of all later positions (`keys_at_end`).

Moving all keys for every new token would read and write the whole cache. Instead the product M of the new factors is
pending for the cached keys and is applied to the few rows that meet them: (M k)ᵀ q = kᵀ (Mᵀ q). Only the keys of the
tokens since then, the live ones, are moved with every token. Every `APPLY_EVERY` tokens, `apply_factors` moves all
keys, at a negligible cost per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..dispatch import decodes_by_triton, kernel_obstacle, step_obstacle
from ..precision import no_autocast, working_dtype
from ..softmax import fused_step
from ..softmax.one_token import Token, cache_product, checked_token, finish_step, groups_of
from ..triangular import solve_unit_lower, spans

# Tokens between two moves of all keys.
APPLY_EVERY = 256
# Positions that `keys_at_end` moves at a time. Products of larger pieces would cost more than they save.
PIECE = 64
# Keys that `apply_factors` moves at a time, so that the moved copy stays in the processor's cache.
KEYS_AT_ONCE = 1024


def keys_at_end(
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    past: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Keys moved by the factors of all positions after them, as a cache keeps them for the next position.

    k, w: [B, H, T, D]; beta: [B, H, T]; past: [B, H, S, D], keys at the end of the past; key_mask: [B, S + T]
    -> [B, H, S + T, D], zero at masked positions: `past` of the operators.
    """
    checks.check_heads_first("k", k, "[B, H, T, D]")
    checks.check_factors(k, w, beta)
    S = 0
    if past is not None:
        checks.check_tensor("past", past)
        if past.ndim != 4:
            raise ValueError(f"past must be [B, H, S, D] (4 dimensions), got shape {list(past.shape)}")
        S = past.shape[2]
        checks.check_shape("past", past, (*k.shape[:2], S, k.shape[3]), "[B, H, S, D]")
        checks.check_float("past", past)
        checks.check_device("past", past, k)
        checks.check_same_dtype("past", past, k)
    checks.check_key_mask(key_mask, k, S)
    wide = working_dtype(k)
    with no_autocast(k):
        new, w, beta = (x.to(wide) for x in (k, w, beta))
        old = k.new_empty(*k.shape[:2], 0, k.shape[3], dtype=wide) if past is None else past.to(wide)
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            new, w = new.masked_fill(hidden[:, :, S:], 0), w.masked_fill(hidden[:, :, S:], 0)
            beta = beta.masked_fill(hidden[:, :, S:, 0], 0)
            old = old.masked_fill(hidden[:, :, :S], 0)
        return torch.cat(_moved(old, new, w, beta), 2).to(k.dtype)


def _moved(old: Tensor, new: Tensor, w: Tensor, beta: Tensor) -> list[Tensor]:
    """From the last piece to the first, with the product of all later factors."""
    D = new.shape[3]
    later = torch.eye(D, dtype=new.dtype, device=new.device)
    done: list[Tensor] = []
    for k, w_, b in reversed(list(zip(*(x.split(PIECE, 2) for x in (new, w, beta)), strict=True))):
        E, F = _leaf_factors(k, w_, b[..., None])
        done.append((k - F.mT @ w_) @ later.mT)
        later = later - (later @ w_.mT) @ E
    done.append(old @ later.mT)
    return done[::-1]


def _leaf_factors(k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """[E, F] = (I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ] of `tree.key_side`, with gradients."""
    rhs = beta * torch.cat([w, (w @ k.mT).tril(-1)], -1)
    E, F = solve_unit_lower(beta * (w @ w.mT).tril(-1), rhs).split([k.shape[-1], k.shape[-2]], -1)
    return E, F


def identity_factors(k: Tensor) -> Tensor:
    """The product of no factors: [B, H, D, D] for keys [B, H, *, D], in at least float32."""
    checks.check_heads_first("k", k, "[B, H, N, D]")
    B, H, _, D = k.shape
    return torch.eye(D, dtype=working_dtype(k), device=k.device).repeat(B, H, 1, 1)


def apply_factors(k: Tensor, product: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Keys [B, H, N, D] moved by a product of factors [B, H, D, D]. No gradients.

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
        for piece in spans(0, k.shape[2], KEYS_AT_ONCE):
            out[:, :, piece] = k[:, :, piece].to(product.dtype) @ product.mT
    return out


class PathDecoded(NamedTuple):
    """The results of one token.

    o: [B, H·G, 1, E], the output; y: [B, H, 1, E], to be appended to `y_past`; live: [B, H, S + 1 − pending, D], the
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
        live: [B, H, S − pending, D], the live keys as the step before returned them, instead of those in k. Written
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
        if decodes_by_triton(impl, k.device, lambda: _triton_obstacle(token, product)):
            return _decode_by_triton(token, w, beta, product, pending, live)
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
        # Apply the product to all keys: overwriting the scores of the live keys is cheaper than joining two parts.
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


def _triton_obstacle(token: Token, product: Tensor) -> str | None:
    """Reason why the kernels cannot decode this token; None if they can."""
    reason = kernel_obstacle(token.k.shape[3], token.v.shape[3], product=product)
    return reason or step_obstacle(token.k, q=token.q, v=token.v, y_past=token.y_past)


def _decode_by_triton(
    token: Token, w: Tensor, beta: Tensor, product: Tensor, pending: int, live: Tensor
) -> PathDecoded:
    learned = token.sharpness if isinstance(token.sharpness, Tensor) else None
    fixed = 0.0 if isinstance(token.sharpness, Tensor) else token.sharpness
    outputs = _decode_op(
        token.q, token.k, token.v, w, beta, token.y_past, product, live, token.inverse_norms, token.key_mask, learned,
        pending, token.scale, fixed,
    )  # fmt: skip
    return PathDecoded(*outputs)


@torch.library.custom_op("lucid_attention::path_decode_triton", mutates_args=())
def _decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    y_past: Tensor,
    product: Tensor,
    live: Tensor,
    inverse_norms: Tensor | None,
    key_mask: Tensor | None,
    sharpness: Tensor | None,
    pending: int,
    scale: float,
    fixed_sharpness: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .triton_decode import step

    c = fixed_sharpness if sharpness is None else sharpness
    token = Token(q, k, v, y_past, inverse_norms, key_mask, None, "key", c, 1.0, scale, None)
    outputs = PathDecoded(*_outputs(q, k, v, live))
    step(token, w, beta, product, live, pending, outputs)
    return outputs.o, outputs.y, outputs.live, outputs.product


def _outputs(q: Tensor, k: Tensor, v: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, H, _, D), wide = k.shape, working_dtype(k)
    moved = k.new_empty(B, H, live.shape[2] + 1, D, dtype=wide)
    return q.new_empty(*q.shape[:3], v.shape[3]), v.new_empty(v.shape), moved, k.new_empty(B, H, D, D, dtype=wide)


@_decode_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, y_past: Tensor, product: Tensor, live: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _outputs(q, k, v, live)
