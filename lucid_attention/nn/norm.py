"""RMS norm, with an optional gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """Learned RMS norm over the last dimension, computed in at least float32, returned in the dtype of x."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """norm(x), or norm(x) · silu(gate) with a gate of the shape of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps)
        if gate is not None:
            y = y * F.silu(gate.to(wide))
        return y.to(x.dtype)
