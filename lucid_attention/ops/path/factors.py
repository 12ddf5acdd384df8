"""Keys moved by Householder factors: the form in which the past of PaTH is kept.

Each position moves all keys before it by its factor H = I − β w wᵀ. A cache therefore keeps keys *at the end*: moved by
the factors of all later positions. While single tokens are decoded, the factors since the last move are collected in
one product, which is applied to all keys now and then.
"""

import torch
from torch import Tensor

from .. import checks
from ..precision import no_autocast, working_dtype
from ..triangular import solve_unit_lower, spans

# Positions that are moved in one go. Products of larger pieces would cost more than they save.
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
    """Keys moved by the factors of all positions after them: as the next position meets them and a cache keeps them.

    k, w: [B, H, T, D]; beta: [B, H, T]; past: [B, H, S, D], keys at the end of the past; key_mask: [B, S + T]
    -> [B, H, S + T, D], zero at masked positions: what `past` of the operators takes.
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
    """[E, F] = (I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ] of `leaves.py`, with gradients."""
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
