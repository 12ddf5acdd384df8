"""How values are read: by our operator where the scores are plain, as the architecture does where they are not."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...ops.softmax.attention import softmax_attention
from .masks import Visible, dense_mask

# Arguments with which an architecture changes its scores.
OWN_SCORES = ("softcap", "s_aux", "position_bias")


class ReadOut(NamedTuple):
    """One layer's softmax: its module, the scale of its scores, dropout, and whatever else the architecture passes."""

    module: nn.Module
    scale: float | None
    dropout: float
    others: dict[str, Any]

    @property
    def plain(self) -> bool:
        """Whether this is softmax(q kᵀ · scale) and nothing else."""
        return not self.dropout and all(self.others.get(name) is None for name in OWN_SCORES)

    def __call__(self, q: Tensor, k: Tensor, y: Tensor, visible: Visible) -> Tensor:
        """q: [B, H·G, T, D], the last T of k: [B, H, S + T, D] and y: [B, H, S + T, E] -> [B, H·G, T, E]."""
        B = q.shape[0]
        if not self.plain:
            return self.dense(q, k, y, visible, k.shape[2] - q.shape[2])
        if visible.cu_seqlens is None:
            return softmax_attention(q, k, y, key_mask=visible.key_mask, scale=self.scale)
        q, k, y = (one_row(x) for x in (q, k, y))
        return separate_rows(softmax_attention(q, k, y, cu_seqlens=visible.cu_seqlens, scale=self.scale), B)

    def dense(self, q: Tensor, k: Tensor, y: Tensor, visible: Visible, position: int | Tensor) -> Tensor:
        """The same with a T × (S + T) mask, for queries from `position` on among the keys."""
        mask = dense_mask(visible, q.shape[0], q.shape[2], k.shape[2], position, q.device)
        return self.stock(q, k, y, mask)

    def stock(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What Transformers computes for this layer; mask: [B, 1, T, S + T] bool, or None for plain causal."""
        if self.plain or (self.others.get("softcap") is None and self.others.get("s_aux") is None):
            read = sdpa_attention_forward
        else:
            # Caps and sinks are not in sdpa; every architecture that has them brings a plain version of its own.
            read = sys.modules[type(self.module).__module__].eager_attention_forward
            if mask is None:
                mask = dense_mask(Visible(), q.shape[0], q.shape[2], k.shape[2], k.shape[2] - q.shape[2], q.device)
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
        o = read(self.module, q, k, v, mask, scaling=self.scale, dropout=self.dropout, **self.others)[0]
        return o.transpose(1, 2)


def one_row(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [1, H, B·T, D]: the rows of a packed batch one behind the other."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def separate_rows(x: Tensor, B: int) -> Tensor:
    """[1, H, B·T, D] -> [B, H, T, D]."""
    return x[0].unflatten(1, (B, -1)).transpose(0, 1)
