"""The defining equation, dense: the measure of every other implementation. Quadratic memory.

    Y = (I + s · diag(β) L)⁻¹ diag(β) V,   L = stril exp(c (cos θ_ij − 1)),     O = softmax(Q Kᵀ · scale + causal) Y

Made of differentiable torch operations, so it has derivatives of every order.
"""

import torch
from torch import Tensor

from ..precision import no_autocast, working_dtype
from ..softmax.attention import softmax_weights, visible_keys
from ..softmax.strips import clean_queries
from .system import System


def dense_matrix(system: System, relation: Tensor | None = None) -> Tensor:
    """The rows of P = I + s · diag(β) L that belong to the new positions: [B, H, T, S + T].

    relation: [B, 1, T, S + T] bool, the keys that a position sees of those before it; None for all.
    """
    (B, _, T, D), S, key_mask = system.k.shape, system.past_length, system.key_mask
    k = system.k if system.k_past is None else torch.cat([system.k_past, system.k], 2)
    c = system.sharpness[..., None, None] if isinstance(system.sharpness, Tensor) else system.sharpness
    visible = visible_keys(B, T, S + T, key_mask, system.cu_seqlens, k.device)
    if relation is not None:
        visible = visible & relation
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
        visible = visible & key_mask[:, None, S:, None]
    own = torch.nn.functional.pad(torch.eye(T, dtype=torch.bool, device=k.device), (S, 0))
    if system.row_max:
        scores = c / D * (k[:, :, S:] @ k.mT)
        # A masked row sees no key. Its own score keeps the maximum finite.
        scores = scores - scores.masked_fill(~(visible | own), -torch.inf).max(-1, keepdim=True).values
    else:
        unit = _directions(k)
        scores = c * (unit[:, :, S:] @ unit.mT - 1)
    # Masked before exp: an infinite exponential under the mask would turn the gradient into NaN.
    L = scores.masked_fill(~visible | own, -torch.inf).exp()
    if system.beta is not None:
        L = system.zero_masked(system.beta)[..., None] * L
    return system.strength * L + own.to(k.dtype)


def _directions(k: Tensor) -> Tensor:
    """k/‖k‖, zero for a key shorter than the smallest normal number. k: [B, H, T, D]."""
    largest = k.detach().abs().amax(-1, keepdim=True)
    # A direction does not depend on the length. Scaled to entries of at most 1, no square overflows or vanishes.
    scaled = k / torch.where(largest > 0, largest, 1)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    zero = largest * length < torch.finfo(k.dtype).tiny
    return torch.where(zero, 0, scaled / torch.where(zero, 1, length))


def precondition(system: System, v: Tensor, relation: Tensor | None = None) -> Tensor:
    """y: [B, H, T, E] in the dtype of v. relation: as in `dense_matrix`."""
    dtype, S = v.dtype, system.past_length
    with no_autocast(v):
        system = system.widened()
        rhs = system.zero_masked(v.to(system.dtype))
        if system.beta is not None:
            rhs = system.zero_masked(system.beta)[..., None] * rhs
        matrix = dense_matrix(system, relation)
        if system.y_past is not None:
            y_past = system.y_past
            if system.key_mask is not None:
                y_past = y_past.masked_fill(~system.key_mask[:, None, :S, None], 0)
            rhs = rhs - matrix[..., :S] @ y_past
        return torch.linalg.solve_triangular(matrix[..., S:], rhs, upper=False, unitriangular=True).to(dtype)


def readout(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float | None
) -> Tensor:
    """o: [B, H·G, T, E] in working precision. k: [B, H, S + T, D]; y: [B, H, S + T, E]."""
    wide = working_dtype(q)
    with no_autocast(q):
        q, k, y = (x.to(wide) for x in (q, k, y))
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            q, k, y = clean_queries(q, key_mask), k.masked_fill(hidden, 0), y.masked_fill(hidden, 0)
        weights = softmax_weights(q, k, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale)
        return weights @ y.repeat_interleave(q.shape[1] // k.shape[1], 1)
