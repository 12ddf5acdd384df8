"""One token of gated slot attention: what decoding does, and what the recurrence repeats."""

import torch
from torch import Tensor

Memory = tuple[Tensor, Tensor]


def step(memory: Memory, q: Tensor, k: Tensor, v: Tensor, s: Tensor, log_decay: Tensor) -> tuple[Tensor, Memory]:
    """Return o: [B, H, G, E] and the new memory.

    memory: [B, H, D, M] and [B, H, M, E]; q: [B, H, G, D]; k: [B, H, D]; v: [B, H, E]; s, log_decay: [B, H, M].
    """
    keys, values = memory
    decay = log_decay.exp()
    keys = torch.addcmul(keys * decay.unsqueeze(-2), k[..., None], s.unsqueeze(-2))
    values = torch.addcmul(values * decay[..., None], s[..., None], v.unsqueeze(-2))
    return (q @ keys).softmax(-1) @ values, (keys, values)
