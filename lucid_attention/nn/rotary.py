"""Rotary position embedding, in the half-split layout of Llama."""

import torch
from torch import Tensor, nn

from ..ops.checks import check_positive


class Rotary(nn.Module):
    """Rotates queries and keys by their positions. Holds no weights.

    Args:
        head_dim: D, even.
        base: the slowest wavelength is about 2π · base.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_positive("rope_base", base)
        if head_dim % 2:
            raise ValueError(
                f"head_dim must be even for rotary embedding, got {head_dim} (rope_base=None switches it off)"
            )
        self.base = base
        self.head_dim = head_dim

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [B, H, T, D], positions: [T] or [B, T] -> [B, H, T, D] in the dtype of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # Not a buffer: module.bfloat16() would round it and module.to_empty() would lose it.
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=x.device) / self.head_dim
        angles = positions[..., None].to(wide) * (self.base**-exponent).to(wide)
        if positions.ndim == 2:
            angles = angles[:, None]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.to(wide).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}"
