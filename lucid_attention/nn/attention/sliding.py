"""Sliding-window softmax attention as a module."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import checks
from ...ops.softmax.sliding import read_window
from ..causal import CausalAttention


class SlidingPast(NamedTuple):
    """The last n = min(S, window − 1) positions. k: [B, H, n, D]; v: [B, H, n, E]; length: S, all positions so far."""

    k: Tensor
    v: Tensor
    length: int


class SlidingAttention(CausalAttention):
    """Softmax attention in which a token sees itself and the window − 1 positions before it.

    The window counts positions, padding included. The past never holds more than the window, so it cannot be cropped.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, rope_base, qk_norm, bias: as in `CausalAttention`.
        window: positions that a token sees, itself included, as Transformers' `sliding_window`.
    """

    title = "sliding window"
    past_type = SlidingPast

    def __init__(self, hidden_size: int, num_heads: int, *, window: int = 512, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        checks.check_size("window", window)
        self.window = window

    def check_past(self, past: SlidingPast, k: Tensor, v: Tensor) -> None:
        checks.check_past((past.k, past.v), k, v)
        window_length = min(past.length, self.window - 1)
        if past.k.shape[2] != window_length:
            raise ValueError(
                f"past must hold the last min(length, window − 1) = {window_length} of its {past.length} positions, "
                f"got {past.k.shape[2]}: it cannot be cropped, nor used with another window"
            )

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: SlidingPast | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, SlidingPast]:
        length = k.shape[2] if past is None else past.length + k.shape[2]
        if past is not None:
            k, v = torch.cat([past.k, k], 2), torch.cat([past.v, v], 2)
        if key_mask is not None:
            key_mask = key_mask[:, length - k.shape[2] :]
        o = read_window(q, k, v, self.window, key_mask=key_mask, cu_seqlens=cu_seqlens)
        return o, SlidingPast(self._kept(k), self._kept(v), length)

    def _kept(self, x: Tensor) -> Tensor:
        dropped = x.shape[2] - (self.window - 1)
        # A copy: a view would keep all of x in memory.
        return x[:, :, dropped:].clone() if dropped > 0 else x

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        return {"window": self.window}

    def extra_repr(self) -> str:
        return f"window={self.window}"
