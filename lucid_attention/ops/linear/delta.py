"""The delta rule, with or without decay (DeltaNet, Gated DeltaNet): the operator and its chunk-wise form.

Chunk by chunk: O(T · (C + D)) products, states only at the borders of chunks. With b the running log decay of a chunk
that starts from S, the corrections u that its tokens write solve

    (I + stril(diag(β) K Kᵀ ∘ Γ)) U = diag(β) (V − diag(eᵇ) K S),     Γ_ij = exp(b_i − b_j)

and o_i = e^{b_i} Sᵀ q_i + Σ_{j ≤ i} Γ_ij (q_i·k_j) u_j. The part that does not depend on S is solved for all chunks at
once.

Shapes: B batch, H key/value heads, G query heads per key/value head, T positions, D key size, E value size.
"""

from functools import partial

import torch
from torch import Tensor

from ..dispatch import RECURRENT, choose
from ..keys import resolved_scale
from ..triangular import solve_unit_lower
from . import fla, reference
from .chunks import attend_in_chunks, chunk_length, cut, join
from .recurrent import (
    Recurrent,
    check_per_token,
    check_sequence,
    check_state,
    empty_state,
    forget_at_borders,
    mask_tokens,
    run,
)

# exp(−1000) is 0 in every precision. Smaller log decays are raised to it, because sums of −∞ have no differences.
FORGOTTEN = -1000.0


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Recurrent[Tensor]:
    """The delta rule: S_t = A_t + β_t k_t (v_t − A_tᵀ k_t)ᵀ with A_t = exp(log_decay_t) S_{t−1}; o_t = scale S_tᵀ q_t.

    DeltaNet without `log_decay`, Gated DeltaNet with it. Keys are used as they come: normalise them to length 1 for a
    rule that cannot blow up.

    Args:
        q: [B, H·G, T, D]. Query heads are a multiple of key/value heads; there is one state per key/value head.
        k: [B, H, T, D].
        v: [B, H, T, E].
        beta: [B, H, T], strength of each write: 0 writes nothing, 1 replaces what the key held, up to 2 is stable.
        log_decay: [B, H, T], at most 0; −∞ forgets the state completely.
        state: [B, H, D, E], as an earlier call returned it; default zero.
        key_mask: [B, T] bool, True where a token takes part. A masked token leaves the state as it is, whatever it
            holds, and reads zero.
        cu_seqlens: int32 [n + 1], borders of n documents packed into one row (B = 1); no document sees another. The
            returned state is that of the last document with a token. Excludes `state`.
        scale: of what is read, default 1/√D.
        impl: "auto", "chunkwise" (linear time), "reference" (token by token) or "fla" (flash-linear-attention's
            kernels, on CUDA only).

    Returns:
        o: [B, H·G, T, E], state: [B, H, D, E].
    """
    check_sequence(q, k, v, key_mask, cu_seqlens, state, scale)
    D, E = k.shape[-1], v.shape[-1]
    check_per_token("beta", beta, k)
    if log_decay is not None:
        check_per_token("log_decay", log_decay, k)
    if state is not None:
        check_state("state", state, k, (D, E), "D, E")
    impl = choose(impl, RECURRENT)
    scale = resolved_scale(scale, k)
    attend = reference.delta if impl == "reference" else partial(attend_in_chunks, _step, _attend_chunks)
    q, k, v, beta, log_decay = mask_tokens(key_mask, q, k, v, beta, log_decay)
    if impl == "fla":
        tensors, gated = {"k": k, "v": v, "beta": beta}, log_decay is not None
        path = "gated_delta_rule.chunk_gated_delta_rule" if gated else "delta_rule.chunk_delta_rule"
        return fla.run(path, q, tensors, {"g": log_decay} if gated else {}, state, cu_seqlens, scale)
    if cu_seqlens is not None:
        log_decay = forget_at_borders(torch.zeros_like(beta) if log_decay is None else log_decay, cu_seqlens)
    state = empty_state(k, D, E) if state is None else state
    return run(attend, q, (k, v, beta, log_decay), state, scale)


def _step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, G, E] and the new state.

    S: [B, H, D, E]; q: [B, H, G, D]; k: [B, H, D]; v: [B, H, E]; beta, log_decay: [B, H].
    """
    if log_decay is not None:
        S = log_decay.exp()[..., None, None] * S
    k = k.unsqueeze(-2)
    u = beta[..., None, None] * (v.unsqueeze(-2) - k @ S)
    S = torch.addcmul(S, k.mT, u)
    return q @ S, S


def _attend_chunks(
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

    Sums in float64 where the device has it: a weak decay after strong ones is a small difference of large sums.
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
