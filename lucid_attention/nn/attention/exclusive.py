"""Exclusive self attention (XSA) as a module."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..causal import CausalAttention


class ExclusiveAttention(CausalAttention):
    """Softmax attention without the token's own value (XSA, Zhai 2026): o − (o·v̂) v̂, v̂ = v/‖v‖ of the same token.

    It has no weights of its own: the residual stream already has what a token knows about itself.

    Args:
        hidden_size, num_heads, num_kv_heads, head_dim, value_dim, rope_base, qk_norm, bias: as in `CausalAttention`.
    """

    title = "XSA"

    def finish(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        wide = torch.promote_types(o.dtype, torch.float32)
        own = F.normalize(v.to(wide), dim=-1).repeat_interleave(self.num_heads // self.num_kv_heads, 1)
        along = (o.to(wide) * own).sum(-1, keepdim=True)
        return (o - along * own).to(o.dtype)
