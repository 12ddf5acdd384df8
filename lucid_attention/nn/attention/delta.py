"""DeltaNet as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.linear.delta import delta_attention
from ..causal import HeadNorm
from ..recurrent import RecurrentAttention


class DeltaAttention(RecurrentAttention):
    """DeltaNet as published: the delta rule on unit keys, after short convolutions.

    With D = E = head_dim its projections have the sizes of softmax attention.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, key_dim, value_dim, bias, impl: as in `RecurrentAttention`.
        conv_size: tokens that the short convolutions of q, k and v see; None for silu without convolutions.
        double_beta: β = 2σ(W x) instead of σ(W x), so that a write can reverse a stored value (negative eigenvalues of
            the transition, Grazzi et al.).
    """

    title = "DeltaNet"

    def __init__(
        self, hidden_size: int, num_heads: int, *, conv_size: int | None = 4, double_beta: bool = False, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_heads, conv_size=conv_size, **options)
        self.double_beta = double_beta
        self.b_proj = nn.Linear(hidden_size, self.num_kv_heads, bias=False)
        self.o_norm = HeadNorm(self.value_dim, eps=1e-5)

    def beta(self, x: Tensor) -> Tensor:
        """β of every token: [B, H, T] in (0, 1), or in (0, 2) with `double_beta`."""
        beta = self.b_proj(x).sigmoid().transpose(1, 2)
        return 2 * beta if self.double_beta else beta

    def log_decay(self, x: Tensor) -> Tensor | None:
        """The log of the decay of the state at each token: [B, H, T], None for no decay."""
        return None

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
        if self.convolutions is None:
            # Without convolutions, apply their silu here.
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        return delta_attention(
            unit(q),
            unit(k),
            v,
            self.beta(x),
            log_decay=self.log_decay(x),
            state=state,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        return self.o_norm(o)


def unit(x: Tensor) -> Tensor:
    """x/‖x‖ with the published ε, which keeps the gradient at x = 0 finite."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
