"""The defining equation, dense: the measure of every other implementation. Quadratic memory.

    Y = (I + s · diag(β) L)⁻¹ diag(β) V,   L = stril exp(c (cos θ_ij − 1)),     O = softmax(Q Kᵀ · scale + causal) Y

With blocks of tokens that see each other, L has ½ exp(…) in both triangles of the diagonal blocks, and the softmax sees
them whole. Made of differentiable torch operations, so it has derivatives of every order.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .. import blocks, packing
from ..precision import no_autocast, working_dtype
from ..softmax.attention import softmax_weights, visible_keys
from ..softmax.strips import clean_queries
from .system import System


def dense_matrix(system: System) -> Tensor:
    """The rows of P = I + s · diag(β) L that belong to the new positions: [B, H, T, S + T]."""
    (B, _, T, D), S, key_mask = system.k.shape, system.past_length, system.key_mask
    k = system.k if system.k_past is None else torch.cat([system.k_past, system.k], 2)
    c = system.sharpness[..., None, None] if isinstance(system.sharpness, Tensor) else system.sharpness
    visible = visible_keys(B, T, S + T, key_mask, system.cu_seqlens, k.device, system.block)
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
    if not blocks.is_causal(system.block):
        number = blocks.numbers(system.block, T, system.cu_seqlens, k.device)
        together = torch.nn.functional.pad(number == number[:, None], (S, 0))
        L = torch.where(together, 0.5 * L, L)
    return system.strength * L + own.to(k.dtype)


def _directions(k: Tensor) -> Tensor:
    """k/‖k‖, zero for a key shorter than the smallest normal number. k: [B, H, T, D]."""
    largest = k.detach().abs().amax(-1, keepdim=True)
    # A direction does not depend on the length. Scaled to entries of at most 1, no square overflows or vanishes.
    scaled = k / torch.where(largest > 0, largest, 1)
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    zero = largest * length < torch.finfo(k.dtype).tiny
    return torch.where(zero, 0, scaled / torch.where(zero, 1, length))


def precondition(system: System, v: Tensor) -> Tensor:
    """y: [B, H, T, E] in the dtype of v."""
    dtype, S = v.dtype, system.past_length
    with no_autocast(v):
        system = system.widened()
        rhs = system.zero_masked(v.to(system.dtype))
        if system.beta is not None:
            rhs = system.zero_masked(system.beta)[..., None] * rhs
        matrix = dense_matrix(system)
        if system.y_past is not None:
            y_past = system.y_past
            if system.key_mask is not None:
                y_past = y_past.masked_fill(~system.key_mask[:, None, :S, None], 0)
            rhs = rhs - matrix[..., :S] @ y_past
        if not blocks.is_causal(system.block):
            return _solve_blocks(matrix[..., S:], rhs, _all_borders(system)).to(dtype)
        return torch.linalg.solve_triangular(matrix[..., S:], rhs, upper=False, unitriangular=True).to(dtype)


def _solve_blocks(matrix: Tensor, rhs: Tensor, borders: list[int]) -> Tensor:
    """matrix⁻¹ rhs, block by block: [B, H, T, T], [B, H, T, E]."""
    solved: list[Tensor] = []
    for start, stop in pairwise(borders):
        here = rhs[..., start:stop, :]
        if start:
            here = here - matrix[..., start:stop, :start] @ torch.cat(solved, -2)
        factor = torch.linalg.cholesky(matrix[..., start:stop, start:stop])
        solved.append(torch.cholesky_solve(here, factor))
    return torch.cat(solved, -2)


def _all_borders(system: System) -> list[int]:
    """The borders of all blocks; those of packed documents count from their start."""
    T = system.k.shape[2]
    documents = [0, T] if system.cu_seqlens is None else packing.offsets(system.cu_seqlens, T)
    return sorted({start + x for start, end in pairwise(documents) for x in blocks.borders(system.block, end - start)})


def readout(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    block: blocks.Block = 1,
) -> Tensor:
    """o: [B, H·G, T, E] in working precision. k: [B, H, S + T, D]; y: [B, H, S + T, E]."""
    wide = working_dtype(q)
    with no_autocast(q):
        q, k, y = (x.to(wide) for x in (q, k, y))
        if key_mask is not None:
            hidden = ~key_mask[:, None, :, None]
            q, k, y = clean_queries(q, key_mask), k.masked_fill(hidden, 0), y.masked_fill(hidden, 0)
        weights = softmax_weights(q, k, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=scale, block=block)
        return weights @ y.repeat_interleave(q.shape[1] // k.shape[1], 1)
