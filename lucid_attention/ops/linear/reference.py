"""The defining recurrences, token by token: what every other implementation is measured against.

Shapes: q: [B, H, T, G, D], the queries of a group side by side; k: [B, H, T, D]; v: [B, H, T, E]; o: [B, H, T, G, E].
Indices in the sums: b batch, h head, g query of the group, d key feature, e value feature, m slot.
"""

import torch
from torch import Tensor


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_{t−1} + β_t k_t (v_t − (a_t S_{t−1})ᵀ k_t)ᵀ,     o_t = S_tᵀ q_t

    beta, log_decay: [B, H, T]; S: [B, H, D, E].
    """
    o = []
    for t in range(k.shape[2]):
        if log_decay is not None:
            S = log_decay[:, :, t, None, None].exp() * S
        held = torch.einsum("bhde,bhd->bhe", S, k[:, :, t])
        write = beta[:, :, t, None] * (v[:, :, t] - held)
        S = S + torch.einsum("bhd,bhe->bhde", k[:, :, t], write)
        o.append(torch.einsum("bhde,bhgd->bhge", S, q[:, :, t]))
    return torch.stack(o, 2), S


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = diag(a_t) S_{t−1} + k_t v_tᵀ,     o_t = S_tᵀ q_t

    log_decay: [B, H, T, D]; S: [B, H, D, E].
    """
    o = []
    for t in range(k.shape[2]):
        S = log_decay[:, :, t, :, None].exp() * S + torch.einsum("bhd,bhe->bhde", k[:, :, t], v[:, :, t])
        o.append(torch.einsum("bhde,bhgd->bhge", S, q[:, :, t]))
    return torch.stack(o, 2), S


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """K̃_t = K̃_{t−1} diag(a_t) + k_t s_tᵀ,     Ṽ_t = diag(a_t) Ṽ_{t−1} + s_t v_tᵀ,     o_t = Ṽ_tᵀ softmax(K̃_tᵀ q_t)

    s, log_decay: [B, H, T, M]; memory: K̃ [B, H, D, M] and Ṽ [B, H, M, E].
    """
    K, V = memory
    o = []
    for t in range(k.shape[2]):
        a = log_decay[:, :, t].exp()
        K = K * a[:, :, None, :] + torch.einsum("bhd,bhm->bhdm", k[:, :, t], s[:, :, t])
        V = V * a[:, :, :, None] + torch.einsum("bhm,bhe->bhme", s[:, :, t], v[:, :, t])
        weights = torch.einsum("bhdm,bhgd->bhgm", K, q[:, :, t]).softmax(-1)
        o.append(torch.einsum("bhme,bhgm->bhge", V, weights))
    return torch.stack(o, 2), (K, V)
