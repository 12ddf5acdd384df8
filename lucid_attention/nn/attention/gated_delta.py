"""Gated DeltaNet as a module."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..causal import split_heads
from .delta import DeltaAttention


class GatedDeltaAttention(DeltaAttention):
    """Gated DeltaNet as published: the delta rule with a decay per token and head, and a gated norm of the output.

    The publication has 6 · hidden_size² weights: 0.75 each for q and k, 1.5 each for v, o and the gate. Here E = 2·D as
    published, but D is smaller, so that the layer has the number of weights of softmax attention: D = head_dim/2 and
    E = head_dim without grouped heads, somewhat less with them.

    Args:
        hidden_size, num_heads, conv_size, double_beta: as in `DeltaAttention`.
        num_kv_heads, head_dim, key_dim, value_dim, bias, impl: as in `RecurrentAttention`.
    """

    title = "Gated DeltaNet"

    query_weights, kv_weights, value_ratio = 5, 3, 2

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        self.a_proj = nn.Linear(hidden_size, self.num_kv_heads, bias=False)
        self.g_proj = nn.Linear(hidden_size, self.num_heads * self.value_dim, bias=False)
        # As in Mamba 2: rates up to 16, and a bias that gives steps between 0.001 and 0.1.
        self.A_log = nn.Parameter(torch.empty(self.num_kv_heads).uniform_(1e-3, 16).log())
        step = torch.empty(self.num_kv_heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def log_decay(self, x: Tensor) -> Tensor:
        a = self.a_proj(x).transpose(1, 2)
        wide = torch.promote_types(a.dtype, torch.float32)
        rate, bias = self.A_log.to(wide).exp()[:, None], self.dt_bias.to(wide)[:, None]
        # log σ(−z) = −softplus(z), because the gradient of softplus fails in compiled graphs (aot_eager) of torch 2.13.
        return rate * F.logsigmoid(-(a.to(wide) + bias))

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        return self.o_norm(o, gate=split_heads(self.g_proj(x), self.value_dim))
