"""Causal attention as a module: projections, rotary embedding, grouped heads, padding, packing, cache.

A variant overrides `values` (what is stored) and `readout` (how it is read). As it stands the class is plain softmax
attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import checks
from ..ops.softmax import softmax_attention
from .rotary import Rotary


class Past(NamedTuple):
    """What is kept of the positions so far. k: [B, H, S, D], y: [B, H, S, E]; scalars: [B, H, S], for decoding."""

    k: Tensor
    y: Tensor
    scalars: Tensor | None = None


class CausalAttention(nn.Module):
    """Softmax attention over what `values` makes of the values.

    Args:
        hidden_size: size of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads, a divisor of num_heads; default num_heads.
        head_dim: D, default hidden_size / num_heads. Any size, odd ones too (then without rotary embedding).
        rope_base: base of the rotary embedding, None for none.
        bias: whether the projections have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float | None = 10_000.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("hidden_size", hidden_size), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads: got {num_heads} and {num_kv_heads}")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(f"hidden_size {hidden_size} is not a multiple of num_heads {num_heads}: give head_dim")
            head_dim = hidden_size // num_heads
        if not isinstance(head_dim, int) or head_dim < 1:
            raise ValueError(f"head_dim must be a positive integer, got {head_dim!r}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)
        self.rotary = None if rope_base is None else Rotary(head_dim, rope_base)

    def forward(
        self,
        x: Tensor,
        *,
        past: Past | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Past]:
        """Attend, and return the output with what the next call needs as `past`.

        Args:
            x: [B, T, hidden_size].
            past: as returned for the S positions before.
            key_mask: [B, S + T] bool, False at padding.
            cu_seqlens: int32 [n + 1], borders of packed documents (B = 1).
            positions: [T] or [B, T], for the rotary embedding. Default: counted, without padding where there is a mask.

        Returns:
            [B, T, hidden_size] and the past of S + T positions.
        """
        checks.check_tensor("x", x)
        if x.ndim != 3 or x.shape[2] != self.q_proj.in_features:
            raise ValueError(f"x must be [B, T, {self.q_proj.in_features}], got shape {list(x.shape)}")
        q, k, v = (
            projection(x).unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
            for projection, heads in (
                (self.q_proj, self.num_heads),
                (self.k_proj, self.num_kv_heads),
                (self.v_proj, self.num_kv_heads),
            )
        )
        self._check(k, v, past, key_mask, cu_seqlens, positions)
        if self.rotary is not None:
            if positions is None:
                positions = _count_positions(x, past, key_mask)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        o, present = self.attend(x, q, k, v, past, key_mask, cu_seqlens)
        return self.o_proj(o.transpose(1, 2).flatten(2)), present

    def _check(
        self,
        k: Tensor,
        v: Tensor,
        past: Past | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        B, _, T, _ = k.shape
        if past is not None and not isinstance(past, Past):
            raise TypeError(f"past must be a Past as returned by the module, got {type(past).__name__}")
        checks.check_kv(k, v)
        checks.check_past(None if past is None else (past.k, past.y), k, v)
        checks.check_key_mask(key_mask, k, 0 if past is None else past.k.shape[2])
        checks.check_cu_seqlens(cu_seqlens, k, past)
        if positions is not None:
            checks.check_tensor("positions", positions)
            if tuple(positions.shape) not in ((T,), (B, T)):
                raise ValueError(
                    f"positions must be [T] = [{T}] or [B, T] = {[B, T]}, got shape {list(positions.shape)}"
                )

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Past | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Past]:
        """From projected q: [B, H·G, T, D], k: [B, H, T, D], v: [B, H, T, E] to o: [B, H·G, T, E] and the new past."""
        y = self.values(x, k, v, past, key_mask, cu_seqlens)
        if past is not None:
            k, y = torch.cat([past.k, k], 2), torch.cat([past.y, y], 2)
        return self.readout(q, k, y, key_mask, cu_seqlens), Past(k, y)

    def values(
        self, x: Tensor, k: Tensor, v: Tensor, past: Past | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """What is stored for the new positions: [B, H, T, E]."""
        return v

    def readout(self, q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """How it is read: [B, H·G, T, E]."""
        return softmax_attention(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens)


def _count_positions(x: Tensor, past: Past | None, key_mask: Tensor | None) -> Tensor:
    T = x.shape[1]
    S = 0 if past is None else past.k.shape[2]
    if key_mask is None:
        return torch.arange(S, S + T, device=x.device)
    return (key_mask.cumsum(-1) - 1).clamp(min=0)[:, S:]
