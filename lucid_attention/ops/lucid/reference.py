"""The defining equation, dense: what every other implementation is measured against. Quadratic memory.

    Y = (I + s · diag(β) stril P)⁻¹ diag(β) V,     O = softmax(Q Kᵀ · scale + causal) Y

Made of differentiable torch operations, so it has derivatives of every order.
"""

import torch
from torch import Tensor

from ..precision import no_autocast, working_dtype
from ..softmax.attention import softmax_weights, visible_keys
from ..softmax.strips import clean_queries


def dense_matrix(
    k: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    beta: Tensor | None,
    norm: str,
    sharpness: float | Tensor,
    strength: float,
) -> Tensor:
    """I + s · diag(β) stril P: [B, H, N, N].

    k: [B, H, N, D]; key_mask: [B, N]; beta: [B, H, N]; sharpness: [H] or a number; strength: s.
    """
    B, _, N, D = k.shape
    visible = visible_keys(B, N, N, key_mask, cu_seqlens, k.device)
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
        visible = visible & key_mask[:, None, :, None]
    c = sharpness[:, None, None] if isinstance(sharpness, Tensor) else sharpness
    if norm == "row_max":
        scores = c / D * (k @ k.mT)
        # A masked row has nothing to look at; its own score keeps the maximum finite.
        own = torch.eye(N, dtype=torch.bool, device=k.device)
        scores = scores - scores.masked_fill(~(visible | own), -torch.inf).max(-1, keepdim=True).values
    else:
        length = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
        unit = k / torch.where(length > 0, length, 1)
        scores = c * (unit @ unit.mT - 1)
    # Masked before exp: an infinite exponential behind the mask would turn the gradient into NaN.
    P = scores.masked_fill(~visible, -torch.inf).exp()
    if beta is not None:
        if key_mask is not None:
            beta = beta.masked_fill(~key_mask[:, None], 0)
        P = beta[..., None] * P
    return strength * P.tril(-1) + torch.eye(N, dtype=P.dtype, device=P.device)


def _precondition(
    k: Tensor,
    v: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    norm: str,
    sharpness: float | Tensor,
    strength: float,
) -> Tensor:
    """y of the new rows, in the dtype of its inputs."""
    S = 0 if k_past is None else k_past.shape[2]
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, S:, None], 0)
        beta = None if beta is None else beta.masked_fill(~key_mask[:, None, S:], 0)
    rhs = v if beta is None else beta[..., None] * v
    if k_past is None or y_past is None:
        P = dense_matrix(k, key_mask, cu_seqlens, beta, norm, sharpness, strength)
        return torch.linalg.solve_triangular(P, rhs, upper=False, unitriangular=True)
    if key_mask is not None:
        y_past = y_past.masked_fill(~key_mask[:, None, :S, None], 0)
    ones = None if beta is None else torch.cat([torch.ones_like(beta[:, :, :1]).expand(-1, -1, S), beta], 2)
    P = dense_matrix(torch.cat([k_past, k], 2), key_mask, cu_seqlens, ones, norm, sharpness, strength)
    return torch.linalg.solve_triangular(
        P[:, :, S:, S:], rhs - P[:, :, S:, :S] @ y_past, upper=False, unitriangular=True
    )


def precondition(
    k: Tensor,
    v: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    norm: str,
    sharpness: float | Tensor,
    strength: float,
) -> Tensor:
    """y: [B, H, T, E] in the dtype of v; arguments as in the public function of this name."""
    wide = working_dtype(k)
    with no_autocast(k):
        k, v, k_past, y_past, beta = (None if x is None else x.to(wide) for x in (k, v, k_past, y_past, beta))  # type: ignore[assignment]
        c = sharpness.to(wide) if isinstance(sharpness, Tensor) else sharpness
        return _precondition(k, v, k_past, y_past, beta, key_mask, cu_seqlens, norm, c, strength)


def read_out(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float | None
) -> Tensor:
    """o: [B, H·G, T, E] in working precision."""
    wide = working_dtype(q)
    with no_autocast(q):
        q, k, y = (x.to(wide) for x in (q, k, y))
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            q, k, y = clean_queries(q, key_mask), k.masked_fill(hidden, 0), y.masked_fill(hidden, 0)
        weights = softmax_weights(q, k, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)
        return weights @ y.repeat_interleave(q.shape[1] // k.shape[1], 1)
