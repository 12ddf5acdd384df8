"""Differential attention as a module."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.softmax.diff import read_difference
from ..causal import CausalAttention, HeadNorm


class DiffAttention(CausalAttention):
    """Differential attention as published (V1): the difference of two softmaxes per head, λ learned, heads normalised.

    λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init with λ_init = 0.8 − 0.6 exp(−0.3 · layer_index). Two query or key heads
    of size D share one value head of size 2·D, so the projections have the sizes of softmax attention.

    Args:
        hidden_size, head_dim, rope_base, qk_norm, bias: as in `CausalAttention`.
        num_heads, num_kv_heads: of the softmax attention that this variant is compared with, both even. The outputs
            have half this number of heads, of twice the size.
        layer_index: of the layer in the model, from 0: later layers start with a larger λ.
    """

    title = "Diff Transformer"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float | None = 10_000.0,
        qk_norm: bool = False,
        bias: bool = False,
        layer_index: int = 0,
    ) -> None:
        options: dict[str, Any] = {"rope_base": rope_base, "qk_norm": qk_norm, "bias": bias}
        super().__init__(hidden_size, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **options)
        for name, value in (("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)):
            if value % 2:
                raise ValueError(f"{name} must be even, two heads make a difference: got {value}")
        if not isinstance(layer_index, int) or isinstance(layer_index, bool) or layer_index < 0:
            raise ValueError(f"layer_index must be an integer from 0 on, got {layer_index!r}")
        self.value_dim = 2 * self.head_dim
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(self.head_dim, dtype=torch.float32).normal_(0, 0.1)) for _ in range(4)
        )
        self.o_norm = HeadNorm(self.value_dim, eps=1e-5)

    def lam(self) -> Tensor:
        """λ: []."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1, q2, k2 = (x.to(wide) for x in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def readout(self, q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        o = read_difference(q, k, y, self.lam(), key_mask=key_mask, cu_seqlens=cu_seqlens)
        return (1 - self.lambda_init) * self.o_norm(o)

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        return {"lam": float(self.lam())}

    def extra_repr(self) -> str:
        return f"lambda_init={self.lambda_init:.3g}"
