"""The dense formulas of PaTH and LUCID-PaTH: what every other implementation is measured against. Quadratic memory.

    scores = tril Q Kᵀ − X (I + diag(β) stril W Wᵀ)⁻¹ diag(β) stril W Kᵀ,     X = tril Q Wᵀ

Made of differentiable torch operations, so it has derivatives of every order.
"""

import math

import torch
from torch import Tensor

from ..keys import inverse_norms
from ..precision import no_autocast
from ..softmax.attention import visible_keys
from .system import PathSystem


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

    q: [B, H·G, T, D]; k, w: [B, H, T, D]; beta: [B, H, T]; k_past: [B, H, S, D], moved to the end of the past.
    """
    B, H, T, D = k.shape
    S = 0 if k_past is None else k_past.shape[2]
    visible = visible_keys(B, T, S + T, key_mask, cu_seqlens, k.device)
    if key_mask is not None:
        # A masked row reads nothing: hide all keys from it.
        visible = visible & key_mask[:, None, S:, None]
    lower = visible[..., S:]
    strict = lower.tril(-1)
    if key_mask is not None:
        hidden = ~key_mask[:, None, S:]
        q, k, w = (x.masked_fill(hidden[..., None], 0) for x in (q, k, w))
        beta = beta.masked_fill(hidden, 0)
        k_past = None if k_past is None else k_past.masked_fill(~key_mask[:, None, :S, None], 0)
    # (I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ]
    b = beta[..., None]
    rhs = b * torch.cat([w, (w @ k.mT).masked_fill(~strict, 0)], -1)
    system = torch.eye(T, dtype=w.dtype, device=w.device) + b * (w @ w.mT).masked_fill(~strict, 0)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    G = q.shape[1] // H
    k, w, solved = (x.repeat_interleave(G, 1) for x in (k, w, solved))
    x = (q @ w.mT).masked_fill(~lower, 0)
    scores = q @ k.mT - x @ solved[..., D:]
    if k_past is not None:
        moved = q - x @ solved[..., :D]
        scores = torch.cat([moved @ k_past.repeat_interleave(G, 1).mT, scores], -1)
    return scores, visible


def attention(system: PathSystem) -> Tensor:
    """softmax(scores · scale) v: [B, H·G, T, E] in working precision. A masked row reads zero."""
    assert system.q is not None
    with no_autocast(system.k):
        system = system.widened()
        q, k, key_mask = system.q, system.k, system.key_mask
        assert q is not None
        scores, visible = path_scores(q, k, system.w, system.beta, system.k_past, key_mask, system.cu_seqlens)
        y = system.v if system.y_past is None else torch.cat([system.y_past, system.v], 2)
        if key_mask is not None:
            y = y.masked_fill(~key_mask[:, None, :, None], 0)
        none = ~visible.any(-1, keepdim=True)
        weights = (scores * system.scale).masked_fill(~(visible | none), -torch.inf).softmax(-1)
        return weights.masked_fill(none, 0) @ y.repeat_interleave(q.shape[1] // k.shape[1], 1)


def precondition(system: PathSystem) -> Tensor:
    """P⁻¹ v: [B, H, T, E] in the dtype of v."""
    dtype, S = system.v.dtype, system.past_length
    with no_autocast(system.k):
        system = system.widened()
        key_mask, k, k_past, inverse = system.key_mask, system.k, system.k_past, system.inverse_norms
        c = system.sharpness
        root = c.sqrt()[..., None, None] if isinstance(c, Tensor) else math.sqrt(c)
        y_past, rhs, u_past = system.y_past, system.v, None
        if key_mask is not None:
            # Before the norm: the gradient of a masked NaN is NaN, not zero.
            hidden, hidden_past = ~key_mask[:, None, S:, None], ~key_mask[:, None, :S, None]
            k, rhs = k.masked_fill(hidden, 0), rhs.masked_fill(hidden, 0)
            if k_past is not None and y_past is not None and inverse is not None:
                k_past, y_past = k_past.masked_fill(hidden_past, 0), y_past.masked_fill(hidden_past, 0)
                inverse = inverse.masked_fill(hidden_past[..., 0], 0)
        u = k * (inverse_norms(k) * root)
        if k_past is not None and inverse is not None:
            u_past = k_past * (inverse[..., None] * root)
        matrix = dense_matrix(u, system.w, system.beta, u_past, key_mask, system.cu_seqlens, c)
        if y_past is not None:
            rhs = rhs - matrix[..., :S] @ y_past
        return torch.linalg.solve_triangular(matrix[..., S:], rhs, upper=False, unitriangular=True).to(dtype)


def dense_matrix(
    u: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    sharpness: float | Tensor,
) -> Tensor:
    """Rows of P = exp(scores of u − c): [B, H, T, S + T], with ones where a position meets itself.

    u: [B, H, T, D] = √c · k/‖k‖; u_past: [B, H, S, D], the same of the past; sharpness: c, a number or [B, H].
    """
    T = u.shape[2]
    scores, visible = path_scores(u, u, w, beta, u_past, key_mask, cu_seqlens)
    c = sharpness[..., None, None] if isinstance(sharpness, Tensor) else sharpness
    own = torch.nn.functional.pad(torch.eye(T, dtype=torch.bool, device=u.device), (scores.shape[-1] - T, 0))
    return (scores - c).masked_fill(~visible | own, -torch.inf).exp() + own.to(u.dtype)
