"""Differential attention: the difference of two softmax read-outs (Ye et al., "Differential Transformer").

Shapes: B batch, H value heads, G query pairs per value head, T new and S past positions, D key size, E value size.
Heads come in pairs of neighbours: heads 2h and 2h + 1 of q are q₁ and q₂ of output head h, and heads 2h and 2h + 1 of k
are k₁ and k₂ of value head h. With grouped heads the authors' two implementations differ; this is the recommended one
(`multihead_flashdiff_1.py`), where the two softmaxes of an output never share a key head.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from .attention import softmax_attention

Past = tuple[Tensor, Tensor]


def diff_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: float | Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal differential attention: (softmax(q₁ k₁ᵀ · scale) − λ softmax(q₂ k₂ᵀ · scale)) v.

    Args:
        q: [B, 2·H·G, T, D], in pairs of neighbours.
        k: [B, 2·H, T, D], in pairs of neighbours.
        v: [B, H, T, E]; E = 2·D in the published module.
        lam: λ, a number or a tensor [].
        past: (k_past [B, 2·H, S, D], v_past [B, H, S, E]) of earlier positions.
        key_mask: [B, S + T] bool, True where a key takes part. A query that sees no key reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); no document sees another.
        scale: of the softmax scores, default 1/√D.

    Returns:
        o: [B, H·G, T, E].
    """
    _check_pairs(q, k, v)
    past = checks.check_past(past, k, v)
    checks.check_key_mask(key_mask, k, 0 if past is None else past[0].shape[2])
    checks.check_cu_seqlens(cu_seqlens, k, past)
    checks.check_scale(scale)
    _check_lam(lam, k)
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return read_difference(q, k, v, lam, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)


def read_difference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: float | Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`diff_attention` without checks, for k and v of all S + T positions."""
    first, second = (
        softmax_attention(q[:, i::2], k[:, i::2], v, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)
        for i in (0, 1)
    )
    wide = torch.promote_types(first.dtype, torch.float32)
    return (first.to(wide) - lam * second.to(wide)).to(first.dtype)


def _check_pairs(q: Any, k: Any, v: Any) -> None:
    checks.check_heads_first("k", k, "[B, 2·H, T, D]")
    checks.check_heads_first("v", v, "[B, H, T, E]")
    B, H, T = v.shape[:3]
    checks.check_shape("k", k, (B, 2 * H, T, k.shape[3]), "[B, 2·H, T, D] for v: [B, H, T, E]")
    checks.check_device("v", v, k)
    checks.check_same_dtype("v", v, k)
    checks.check_q(q, k)


def _check_lam(lam: Any, k: Tensor) -> None:
    if isinstance(lam, Tensor):
        checks.check_float("lam", lam)
        checks.check_shape("lam", lam, (), "a number or a tensor []")
        checks.check_device("lam", lam, k)
    elif isinstance(lam, bool) or not isinstance(lam, (int, float)):
        raise TypeError(f"lam must be a number or a tensor [], got {type(lam).__name__}")
