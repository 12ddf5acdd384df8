"""One token of the delta rule: what decoding does, and what the recurrence repeats."""

import torch
from torch import Tensor


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return o: [B, H, G, E] and the new state.

    S: [B, H, D, E]; q: [B, H, G, D]; k: [B, H, D]; v: [B, H, E]; beta, log_decay: [B, H].
    """
    if log_decay is not None:
        S = log_decay.exp()[..., None, None] * S
    k = k.unsqueeze(-2)
    u = beta[..., None, None] * (v.unsqueeze(-2) - k @ S)
    S = torch.addcmul(S, k.mT, u)
    return q @ S, S
