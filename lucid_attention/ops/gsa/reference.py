"""The defining recurrence, token by token: what every other implementation is measured against.

K̃_t = K̃_{t−1} diag(a_t) + k_t s_tᵀ,     Ṽ_t = diag(a_t) Ṽ_{t−1} + s_t v_tᵀ,     o_t = Ṽ_tᵀ softmax(K̃_tᵀ q_t)
"""

import torch
from torch import Tensor

from ..linear.chunks import along
from .step import Memory, step


def attend(q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
    """Return o: [B, H, T, G, E] and the last memory.

    q: [B, H, T, G, D]; k: [B, H, T, D]; v: [B, H, T, E]; s, log_decay: [B, H, T, M]; memory: [B, H, D, M] and
    [B, H, M, E].
    """
    o = []
    for token in along((q, k, v, s, log_decay), lambda x: x.unbind(2)):
        read, memory = step(memory, *token)
        o.append(read)
    return torch.stack(o, 2), memory
