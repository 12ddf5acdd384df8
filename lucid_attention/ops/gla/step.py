"""One token of gated linear attention: what decoding does, and what the recurrence repeats."""

import torch
from torch import Tensor


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, G, E] and the new state.

    S: [B, H, D, E]; q: [B, H, G, D]; k, log_decay: [B, H, D]; v: [B, H, E].
    """
    S = torch.addcmul(log_decay.exp()[..., None] * S, k[..., None], v.unsqueeze(-2))
    return q @ S, S
