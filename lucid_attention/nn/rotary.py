"""Rotary position embedding, in the half-split layout of Llama."""

import torch
from torch import Tensor, nn

from ..ops.checks import check_positive


class Rotary(nn.Module):
    """Rotates queries and keys by their positions. Holds no weights.

    Args:
        head_dim: D, even.
        base: the slowest wavelength is about 2π · base.
        rotary_dim: the first features of a head, which are rotated, an even number; default all.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0, rotary_dim: int | None = None) -> None:
        super().__init__()
        check_positive("rope_base", base)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if rotary_dim == head_dim and head_dim % 2:
            raise ValueError(
                f"head_dim must be even for rotary embedding, got {head_dim} (rope_base=None switches it off)"
            )
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(f"rotary_dim must be even, from 2 to head_dim = {head_dim}, got {rotary_dim}")
        self.base = base
        self.head_dim, self.rotary_dim = head_dim, rotary_dim

    def frequencies(self, positions: Tensor) -> tuple[Tensor, float]:
        """Radians per position, float32 [rotary_dim / 2], and a factor of the rotated features."""
        # Not a buffer: module.bfloat16() would round it and module.to_empty() would lose it.
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=positions.device) / self.rotary_dim
        return self.base**-exponent, 1.0

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [B, H, T, D], positions: [T] or [B, T] -> [B, H, T, D] in the dtype of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        frequencies, factor = self.frequencies(positions)
        angles = positions[..., None].to(wide) * frequencies.to(wide)
        if positions.ndim == 2:
            angles = angles[:, None]
        cos, sin = angles.cos(), angles.sin()
        if factor != 1:
            cos, sin = factor * cos, factor * sin
        rotated, kept = x.split([self.rotary_dim, self.head_dim - self.rotary_dim], -1)
        first, second = rotated.to(wide).chunk(2, -1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return torch.cat([rotated, kept], -1) if kept.shape[-1] else rotated

    def extra_repr(self) -> str:
        partial = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return f"head_dim={self.head_dim}, base={self.base:g}{partial}"
