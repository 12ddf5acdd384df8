"""The defining recurrences, token by token: the measure of every other implementation.

Shapes: q: [B, H, T, G, D], the queries of a group contiguous; k: [B, H, T, D]; v: [B, H, T, E]; o: [B, H, T, G, E].
Indices in the sums: b batch, h head, g query of the group, d key feature, e value feature, m slot.
"""

import torch
from torch import Tensor


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_{t−1} + β_t k_t (v_t − (a_t S_{t−1})ᵀ k_t)ᵀ,     o_t = S_tᵀ q_t

    beta, log_decay: [B, H, T]; S: [B, H, D, E].
    """
    o = []
    decays = [None] * k.shape[2] if log_decay is None else log_decay.exp().unbind(2)
    for q_t, k_t, v_t, b_t, a_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), beta.unbind(2), decays, strict=True):
        if a_t is not None:
            S = a_t[..., None, None] * S
        held = torch.einsum("bhde,bhd->bhe", S, k_t)
        S = S + torch.einsum("bhd,bhe->bhde", k_t, b_t[..., None] * (v_t - held))
        o.append(torch.einsum("bhde,bhgd->bhge", S, q_t))
    return torch.stack(o, 2), S


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = diag(a_t) S_{t−1} + k_t v_tᵀ,     o_t = S_tᵀ q_t

    log_decay: [B, H, T, D]; S: [B, H, D, E].
    """
    o = []
    for q_t, k_t, v_t, a_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), log_decay.exp().unbind(2), strict=True):
        S = a_t[..., :, None] * S + torch.einsum("bhd,bhe->bhde", k_t, v_t)
        o.append(torch.einsum("bhde,bhgd->bhge", S, q_t))
    return torch.stack(o, 2), S


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """K̃_t = K̃_{t−1} diag(a_t) + k_t s_tᵀ,     Ṽ_t = diag(a_t) Ṽ_{t−1} + s_t v_tᵀ,     o_t = Ṽ_tᵀ softmax(K̃_tᵀ q_t)

    s, log_decay: [B, H, T, M]; memory: K̃ [B, H, D, M] and Ṽ [B, H, M, E].
    """
    K, V = memory
    o = []
    tokens = zip(q.unbind(2), k.unbind(2), v.unbind(2), s.unbind(2), log_decay.exp().unbind(2), strict=True)
    for q_t, k_t, v_t, s_t, a_t in tokens:
        K = K * a_t[..., None, :] + torch.einsum("bhd,bhm->bhdm", k_t, s_t)
        V = V * a_t[..., :, None] + torch.einsum("bhm,bhe->bhme", s_t, v_t)
        weights = torch.einsum("bhdm,bhgd->bhgm", K, q_t).softmax(-1)
        o.append(torch.einsum("bhme,bhgm->bhge", V, weights))
    return torch.stack(o, 2), (K, V)
