"""Gated linear attention as a module."""

from typing import Any

from torch import Tensor, nn

from ...ops.checks import check_positive
from ...ops.linear.gated import gla_attention
from ..causal import HeadNorm, check_size, split_heads
from ..recurrent import RecurrentAttention, log_sigmoid_gate


class GlaAttention(RecurrentAttention):
    """Gated linear attention (GLA) as published: a decay per feature of the keys, and a gated norm of the output.

    The defaults are the published sizes D = head_dim/2 and E = head_dim, which give the number of weights of
    softmax attention. With grouped heads D and E are somewhat smaller, so that the number stays the same.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, key_dim, value_dim, conv_size, bias, impl: as in
            `RecurrentAttention`.
        gate_rank: inner size of the two-matrix projection of the decays.
        gate_temperature: τ in the decay σ(W x)^(1/τ).
    """

    title = "GLA"

    query_weights, kv_weights, value_ratio = 5, 3, 2

    def __init__(
        self, hidden_size: int, num_heads: int, *, gate_rank: int = 16, gate_temperature: float = 16.0, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, **options)
        check_size("gate_rank", gate_rank)
        check_positive("gate_temperature", gate_temperature)
        self.gate_temperature = gate_temperature
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_rank, bias=False), nn.Linear(gate_rank, self.num_kv_heads * self.head_dim)
        )
        self.g_proj = nn.Linear(hidden_size, self.num_heads * self.value_dim, bias=False)
        self.o_norm = HeadNorm(self.value_dim, eps=1e-5)

    def recur(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        log_decay = log_sigmoid_gate(split_heads(self.f_proj(x), self.head_dim), self.gate_temperature)
        return gla_attention(q, k, v, log_decay, state=state, key_mask=key_mask, cu_seqlens=cu_seqlens, impl=self.impl)

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        return self.o_norm(o, gate=split_heads(self.g_proj(x), self.value_dim))
