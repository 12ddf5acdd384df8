"""The public operator.

Shapes: B batch, H key/value heads, G query heads per key/value head, T new and S past positions, D key size, E value
size.
"""

import math

import torch
from torch import Tensor

from .. import checks, packing
from ..dispatch import choose
from ..forward_mode import refuse_forward_mode
from ..keys import rms_normalize
from ..precision import no_autocast, read_out_dtype
from ..softmax.attention import softmax_attention
from ..softmax.strips import clean_queries
from . import reference
from .torch_op import precondition_op

Past = tuple[Tensor, Tensor]


def lucid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal LUCID attention: softmax(q kᵀ · scale) P⁻¹ v, where `scaled_dot_product_attention` reads v itself.

    Args:
        q: [B, H·G, T, D]. Query heads are a multiple of key/value heads; the solve is paid once per key/value head.
        k: [B, H, T, D], as the softmax sees them (after rotary embedding).
        v: [B, H, T, E].
        past: (k_past [B, H, S, D], y_past [B, H, S, E]), keys and *preconditioned* values of earlier positions, as
            `precondition` returned them.
        key_mask: [B, S + T] bool, True where a key takes part. A masked key leaves P and the softmax, whatever stands
            there. A query that sees no key reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1): none sees another.
        beta: [B, H, T] in [0, 1], step size of each write: Y = (I + diag(β) stril P)⁻¹ diag(β) V.
        norm: "key" (P of keys normalised to √D, the paper's), "qk" (gain-free RMS norm of q and k in the softmax as
            well), "row_max" (P of raw keys, causal row maximum subtracted).
        sharpness: c in P_ij = exp(c (cos θ_ij − 1)), a positive number or a tensor [H]. Default √D, the paper's matrix;
            c → ∞ is softmax attention.
        strength: s in P = I + s · stril exp(…), a number from 0 (softmax attention, no solve) to 1 (LUCID).
        scale: of the softmax scores, default 1/√D.
        impl: "auto", "blockwise" (linear memory) or "reference" (the dense equation).

    Returns:
        o: [B, H·G, T, E].
    """
    past = _check(k, v, past, key_mask, cu_seqlens, beta, norm, sharpness, strength)
    checks.check_q(q, k)
    checks.check_scale(scale)
    impl = choose(impl)
    y = _precondition(k, v, past, key_mask, cu_seqlens, beta, norm, sharpness, strength, impl)
    if past is not None:
        k, y = torch.cat([past[0], k], 2), torch.cat([past[1], y.to(past[1].dtype)], 2)
    if norm == "qk":
        q, k = normalize_read_out(q, k, key_mask)
    if impl == "reference":
        return reference.read_out(q, k, y, key_mask, cu_seqlens, scale).to(read_out_dtype(q))
    return softmax_attention(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)


def normalize_read_out(q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k as the softmax of norm="qk" sees them: gain-free RMS norm. q: [B, H·G, T, D], k: [B, H, S + T, D]."""
    if key_mask is not None:
        # Before the norm: the gradient of a masked NaN is NaN, not zero.
        q, k = clean_queries(q, key_mask), k.masked_fill(~key_mask[:, None, :, None], 0)
    return rms_normalize(q), rms_normalize(k)


def precondition(
    k: Tensor,
    v: Tensor,
    *,
    past: Past | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
    impl: str = "auto",
) -> Tensor:
    """Y = P⁻¹ V: the values that softmax attention reads in LUCID, and what a cache keeps instead of V.

    k: [B, H, T, D], v: [B, H, T, E] -> y: [B, H, T, E], zero at masked keys. Arguments as in `lucid_attention`.
    """
    past = _check(k, v, past, key_mask, cu_seqlens, beta, norm, sharpness, strength)
    return _precondition(k, v, past, key_mask, cu_seqlens, beta, norm, sharpness, strength, choose(impl))


def preconditioner(
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    beta: Tensor | None = None,
    norm: str = "key",
    sharpness: float | Tensor | None = None,
    strength: float = 1.0,
) -> Tensor:
    """The matrix P = I + s · diag(β) stril exp(…) itself: [B, H, T, T] for k: [B, H, T, D]. For analysis and teaching.

    A masked key has a row and a column of the identity. Arguments as in `lucid_attention`.
    """
    _check(k, k, None, key_mask, cu_seqlens, beta, norm, sharpness, strength)
    if cu_seqlens is not None:
        packing.offsets(cu_seqlens, k.shape[2])
    c = _sharpness(k, sharpness)
    wide = torch.promote_types(k.dtype, torch.float32)
    c = c.to(wide) if isinstance(c, Tensor) else c
    with no_autocast(k):
        return reference.dense_matrix(k.to(wide), key_mask, cu_seqlens, beta, norm, c, strength).to(k.dtype)


def _check(
    k: Tensor,
    v: Tensor,
    past: Past | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    beta: Tensor | None,
    norm: str,
    sharpness: float | Tensor | None,
    strength: float,
) -> Past | None:
    checks.check_kv(k, v)
    past = checks.check_past(past, k, v)
    checks.check_key_mask(key_mask, k, 0 if past is None else past[0].shape[2])
    checks.check_cu_seqlens(cu_seqlens, k, past)
    checks.check_beta(beta, k)
    checks.check_norm(norm)
    checks.check_sharpness(sharpness, k)
    checks.check_strength(strength)
    return past


def _sharpness(k: Tensor, sharpness: float | Tensor | None) -> float | Tensor:
    if sharpness is None:
        return math.sqrt(k.shape[-1])
    return sharpness if isinstance(sharpness, Tensor) else float(sharpness)


def _precondition(
    k: Tensor,
    v: Tensor,
    past: Past | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    beta: Tensor | None,
    norm: str,
    sharpness: float | Tensor | None,
    strength: float,
    impl: str,
) -> Tensor:
    k_past, y_past = past if past is not None else (None, None)
    c = _sharpness(k, sharpness)
    if impl == "reference":
        if cu_seqlens is not None:
            packing.offsets(cu_seqlens, k.shape[2])
        args = k, v, k_past, y_past, beta, key_mask, cu_seqlens, norm, c, strength
        return reference.precondition(*args).to(v.dtype)
    refuse_forward_mode(k, v, k_past, y_past, beta, c)
    learned = c.expand(k.shape[0], -1) if isinstance(c, Tensor) else None
    default = 0.0 if isinstance(c, Tensor) else c
    optional = k_past, y_past, beta, learned, key_mask, cu_seqlens
    # Of the ways from a number to a tensor, a product is the one in which a compiler does not fix the number.
    s = None if strength == 1 else torch.ones((), dtype=torch.float64, device="cpu") * strength
    return precondition_op(k, v, *optional, default, norm == "row_max", s)[0]
