"""Gated attention as a module."""

from typing import Any

from torch import Tensor, nn

from ..causal import CausalAttention


class GatedAttention(CausalAttention):
    """Softmax attention whose output is gated (Qiu et al. 2025, headwise): o · σ(W x), one gate per query head.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, rope_base, qk_norm, bias: as in `CausalAttention`.
    """

    title = "gated softmax"

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        self.g_proj = nn.Linear(hidden_size, num_heads, bias=False)

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        return o * self.g_proj(x).sigmoid().transpose(1, 2)[..., None]

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        # The weights are those of softmax attention; the gate scales what they read.
        return {}
