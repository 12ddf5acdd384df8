"""The delta rule chunk by chunk: O(T · (C + D)) products, states only at the borders of chunks.

With b the running log decay of a chunk that starts from S, the corrections u that its tokens write solve

    (I + stril(diag(β) K Kᵀ ∘ Γ)) U = diag(β) (V − diag(eᵇ) K S),     Γ_ij = exp(b_i − b_j)

and o_i = e^{b_i} Sᵀ q_i + Σ_{j ≤ i} Γ_ij (q_i·k_j) u_j. What does not know S is solved for all chunks at once.
"""

import torch
from torch import Tensor

from ..linear.chunks import along, chunk_length, cut, in_segments, join
from ..triangular import solve_unit_lower
from .step import step

# exp(−1000) is 0 in every precision: below nothing changes, but sums of −∞ have no differences.
FORGOTTEN = -1000.0


def attend(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, T, G, E] and the last state.

    q: [B, H, T, G, D]; k: [B, H, T, D]; v: [B, H, T, E]; beta, log_decay: [B, H, T]; state: [B, H, D, E].
    """
    tensors = q, k, v, beta, log_decay
    if k.shape[2] > 1:
        return in_segments(_attend, tensors, state)
    (token,) = along(tensors, lambda x: x.unbind(2))
    o, state = step(state, *token)
    return o.unsqueeze(2), state


def _attend(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    B, H, T, G, _ = q.shape
    C = chunk_length(T)
    q, k, v, beta = cut(q, C), cut(k, C), cut(v, C), cut(beta[..., None], C)
    q = q.flatten(2, 3)
    if log_decay is None:
        corrections, read = _solve(k, v, beta, k, None), _scores(q, k, None, G)
        leaving, total = k, None
    else:
        within, arriving, departing, total = _decays(cut(log_decay, C), k.dtype)
        corrections, read = _solve(k, v, beta, k * arriving, within), _scores(q, k, within, G)
        leaving = k * departing
        q = q * arriving.repeat_interleave(G, 2)
    before, u, state = _carry(*corrections, leaving, total, state.flatten(0, 1))
    o = torch.matmul(q, before) + torch.matmul(read, u)
    return join(o.unflatten(2, (C, G)), B, T), state.unflatten(0, (B, H))


def _decays(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Γ [n, N, C, C], zero above the diagonal; eᵇ and e^{b_C − b} [n, N, C, 1]; e^{b_C} [n, N, 1, 1].

    Sums in float64 where the device has it: a weak decay behind strong ones is a small difference of large sums.
    """
    wide = dtype if log_decay.device.type == "mps" else torch.float64
    b = log_decay.clamp(min=FORGOTTEN).to(wide).cumsum(-1)[..., None]
    ahead = torch.ones(b.shape[2], b.shape[2], dtype=torch.bool, device=b.device).triu(1)
    # Masked before exp: an infinite exponential above the diagonal would turn the gradient into NaN.
    within = (b - b.mT).to(dtype).masked_fill(ahead, -torch.inf).exp()
    last = b[:, :, -1:]
    return within, b.to(dtype).exp(), (last - b).to(dtype).exp(), last.to(dtype).exp()


def _solve(k: Tensor, v: Tensor, beta: Tensor, arriving: Tensor, within: Tensor | None) -> tuple[Tensor, Tensor]:
    """What each chunk would write from an empty state, [n, N, C, E], and how a state S changes it: minus w S."""
    matrix = beta * (k @ k.mT if within is None else (k @ k.mT) * within)
    solved = solve_unit_lower(matrix, beta * torch.cat([v, arriving], -1))
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return u, w


def _scores(q: Tensor, k: Tensor, within: Tensor | None, G: int) -> Tensor:
    """Γ_ij (q_i·k_j) for j ≤ i: [n, N, C·G, C]."""
    scores = q @ k.mT
    if within is not None:
        return scores * within.repeat_interleave(G, 2)
    C = k.shape[2]
    ahead = torch.ones(C, C, dtype=torch.bool, device=k.device).triu(1)
    return scores.masked_fill(ahead.repeat_interleave(G, 0), 0)


def _carry(u: Tensor, w: Tensor, leaving: Tensor, total: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states before each chunk [n, N, D, E], the corrections u − w S that the chunks write, and the last state."""
    before, written = [], []
    totals = [None] * u.shape[1] if total is None else total.unbind(1)
    for alone, change, key, decay in zip(u.unbind(1), w.unbind(1), leaving.mT.unbind(1), totals, strict=True):
        before.append(state)
        new = torch.baddbmm(alone, change, state, alpha=-1)
        written.append(new)
        state = torch.baddbmm(state if decay is None else decay * state, key, new)
    return torch.stack(before, 1), torch.stack(written, 1), state
