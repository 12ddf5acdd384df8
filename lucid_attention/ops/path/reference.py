"""The dense formulas of PaTH and LUCID-PaTH: what every other implementation is measured against. Quadratic memory.

    scores = tril Q Kᵀ − X (I + diag(β) stril W Wᵀ)⁻¹ diag(β) stril W Kᵀ,     X = tril Q Wᵀ

Made of differentiable torch operations, so it has derivatives of every order.
"""

import torch
from torch import Tensor

from ..softmax.attention import visible_keys
from ..triangular import solve_unit_lower


def solve_factors(k: Tensor, w: Tensor, beta: Tensor, strict: Tensor) -> Tensor:
    """(I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ]: [B, H, T, D + T], of which everything else is made.

    k, w: [B, H, T, D]; beta: [B, H, T]; strict: [..., T, T], where the lower triangle is.
    """
    b = beta[..., None]
    rhs = b * torch.cat([w, (w @ k.mT).masked_fill(~strict, 0)], -1)
    return solve_unit_lower(b * (w @ w.mT).masked_fill(~strict, 0), rhs)


def path_scores(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q_iᵀ H_i … H_{j+1} k_j as [B, H·G, T, S + T], and which of them may be read: [B, 1, T, S + T].

    q: [B, H·G, T, D]; k, w: [B, H, T, D]; beta: [B, H, T]; k_past: [B, H, S, D], re-based to the end of the past.
    """
    B, H, T, D = k.shape
    S = 0 if k_past is None else k_past.shape[2]
    visible = visible_keys(B, T, S + T, key_mask, cu_seqlens, k.device)
    if key_mask is not None:
        # A masked row reads nothing; without this its scores would be as good as any.
        visible = visible & key_mask[:, None, S:, None]
    lower = visible[..., S:]
    strict = lower.tril(-1)
    if key_mask is not None:
        hidden = ~key_mask[:, None, S:]
        q, k, w = (x.masked_fill(hidden[..., None], 0) for x in (q, k, w))
        beta = beta.masked_fill(hidden, 0)
        k_past = None if k_past is None else k_past.masked_fill(~key_mask[:, None, :S, None], 0)
    solved = solve_factors(k, w, beta, strict)
    G = q.shape[1] // H
    k, w, solved = (x.repeat_interleave(G, 1) for x in (k, w, solved))
    x = (q @ w.mT).masked_fill(~lower, 0)
    scores = q @ k.mT - x @ solved[..., D:]
    if k_past is not None:
        rebased = q - x @ solved[..., :D]
        scores = torch.cat([rebased @ k_past.repeat_interleave(G, 1).mT, scores], -1)
    return scores, visible


def attention(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:
    """softmax(scores · scale) y: [B, H·G, T, E]. A masked row reads zero."""
    scores, visible = path_scores(q, k, w, beta, k_past, key_mask, cu_seqlens)
    y = y if y_past is None else torch.cat([y_past, y], 2)
    if key_mask is not None:
        y = y.masked_fill(~key_mask[:, None, :, None], 0)
    none = ~visible.any(-1, keepdim=True)
    weights = (scores * scale).masked_fill(~(visible | none), -torch.inf).softmax(-1).masked_fill(none, 0)
    return weights @ y.repeat_interleave(q.shape[1] // k.shape[1], 1)


def precondition(
    u: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    y_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    shift: float | Tensor,
) -> Tensor:
    """(I + stril exp(scores of u − shift))⁻¹ v: [B, H, T, E]. shift: [H] or a number."""
    T = u.shape[2]
    matrix = dense_matrix(u, w, beta, u_past, key_mask, cu_seqlens, shift)
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, -T:, None], 0)
    if y_past is not None:
        S = y_past.shape[2]
        if key_mask is not None:
            y_past = y_past.masked_fill(~key_mask[:, None, :S, None], 0)
        v, matrix = v - matrix[..., :S] @ y_past, matrix[..., S:]
    return torch.linalg.solve_triangular(matrix, v, upper=False, unitriangular=True)


def dense_matrix(
    u: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    shift: float | Tensor,
) -> Tensor:
    """Rows of P: [B, H, T, S + T], with ones where a position meets itself."""
    T = u.shape[2]
    scores, visible = path_scores(u, u, w, beta, u_past, key_mask, cu_seqlens)
    c = shift[:, None, None] if isinstance(shift, Tensor) else shift
    own = torch.eye(T, dtype=torch.bool, device=u.device)
    own = torch.nn.functional.pad(own, (scores.shape[-1] - T, 0))
    return (scores - c).masked_fill(~visible | own, -torch.inf).exp() + own.to(u.dtype)
