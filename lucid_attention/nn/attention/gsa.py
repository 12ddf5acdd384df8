"""Gated slot attention as a module."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.checks import check_positive
from ...ops.linear.gated import gsa_attention
from ..causal import HeadNorm, check_size, split_heads
from ..recurrent import RecurrentAttention, log_sigmoid_gate


class GsaAttention(RecurrentAttention):
    """Gated slot attention (GSA) as published: softmax attention over slots of keys and values that forget.

    By default there are D slots and E = D, as published. The gate of the slots is a fifth projection. D = 0.8 ·
    head_dim (nearly head_dim with grouped heads) gives the layer the number of weights of softmax attention.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, key_dim, value_dim, conv_size, bias, impl: as in
            `RecurrentAttention`.
        num_slots: M, default key_dim.
        gate_temperature: τ in the decay σ(W x)^(1/τ).
    """

    title = "GSA"

    kv_weights = 3

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_slots: int | None = None,
        gate_temperature: float = 8.0,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, **options)
        self.num_slots = self.head_dim if num_slots is None else num_slots
        check_size("num_slots", self.num_slots)
        check_positive("gate_temperature", gate_temperature)
        self.gate_temperature = gate_temperature
        self.f_proj = nn.Linear(hidden_size, self.num_kv_heads * self.num_slots, bias=False)
        # One norm over all heads together, as published.
        self.o_norm = HeadNorm(self.num_heads * self.value_dim, eps=1e-5)

    def recur(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        log_decay = log_sigmoid_gate(split_heads(self.f_proj(x), self.num_slots), self.gate_temperature)
        return gsa_attention(
            F.silu(q),
            F.silu(k),
            F.silu(v),
            -log_decay.expm1(),  # 1 − decay: the share that a slot forgets is replaced
            log_decay,
            state=state,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            scale=1.0,
            impl=self.impl,
        )

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        heads = F.silu(o.transpose(1, 2).flatten(2))
        return split_heads(self.o_norm(heads), self.value_dim)
