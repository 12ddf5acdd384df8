"""The defining recurrence, token by token: what every other implementation is measured against.

S_t = a_t S_{t−1} + β_t k_t (v_t − (a_t S_{t−1})ᵀ k_t)ᵀ,     o_t = S_tᵀ q_t
"""

import torch
from torch import Tensor

from ..linear.chunks import along
from .step import step


def attend(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, T, G, E] and the last state.

    q: [B, H, T, G, D]; k: [B, H, T, D]; v: [B, H, T, E]; beta, log_decay: [B, H, T]; state: [B, H, D, E].
    """
    o = []
    for token in along((q, k, v, beta, log_decay), lambda x: x.unbind(2)):
        read, state = step(state, *token)
        o.append(read)
    return torch.stack(o, 2), state
