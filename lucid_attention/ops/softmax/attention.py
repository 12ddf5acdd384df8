"""The softmax read-out o = softmax(q kᵀ · scale + causal) y, on `scaled_dot_product_attention`.

Queries are the last T of S + T positions. Plain causal attention goes straight to torch. What torch can only do with a
T × T mask (padding, a cached past, packed documents) runs as an operator of ours over strips of queries, so that
memory stays linear in the length, forward and backward; on a GPU, in 16 bit, they go to torch's kernel for sequences of
different lengths (`varlen.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import custom_op, packing
from ..custom_op import refuse_forward_mode
from ..keys import resolved_scale
from ..precision import readout_dtype, working_dtype
from . import fused_step, varlen
from .one_token import Token
from .strips import attend_strips, attend_strips_backward, grouped_sdpa


def softmax_attention(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Read y by softmax attention.

    q: [B, H·G, T, D]; k: [B, H, S + T, D]; y: [B, H, S + T, E]; key_mask: [B, S + T] -> [B, H·G, T, E]. A query that
    sees no key reads zero.
    """
    scale = resolved_scale(scale, q)
    q, k, y = _under_autocast(q, k, y)
    if q.shape[2] == 1 and cu_seqlens is None and k.shape[2] > 1:
        token = _one_query(q, k, y, key_mask, scale)
        if token is not None:
            return fused_step.run(token).o
    if scale <= 0:
        # Torch's CPU kernel scales the −∞ of its causal mask as well.
        q, scale = q * scale, 1.0
    T, total, E = q.shape[2], k.shape[2], y.shape[3]
    # Torch's fast kernels want one head size; without it they fall back to a dense T × T product.
    widest = max(q.shape[3], E)
    q, k, y = (F.pad(x, (0, widest - x.shape[3])) if x.shape[3] < widest else x for x in (q, k, y))
    plain = key_mask is None and cu_seqlens is None
    if plain and total == T:
        o = grouped_sdpa(q, k, y, scale, causal=True)
    elif plain and T == 1:
        o = grouped_sdpa(q, k, y, scale)
    elif varlen.can_read(q, key_mask, scale):
        o = varlen.read(q, k, y, key_mask, cu_seqlens, scale)
    else:
        refuse_forward_mode(q, k, y)
        o = softmax_attention_op.forward(q, k, y, key_mask, cu_seqlens, scale)[0]
    return o[..., :E]


def _one_query(q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, scale: float) -> Token | None:
    """A decoding step that can run in one pass over the cache; None where it cannot."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or y.requires_grad):
        return None
    token = Token(q, k, y[:, :, -1:], y[:, :, :-1], None, key_mask, None, "key", 0.0, 1.0, scale, None)
    return token if fused_step.chosen("auto", token) else None


def _under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for `scaled_dot_product_attention`: our own operator must not differ from it."""
    return tuple(x.to(readout_dtype(x)) for x in tensors)


def _shapes(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], y.shape[3]), q.new_empty(q.shape[:3], dtype=working_dtype(q))


def _backward(
    douts: Sequence[Tensor | None], outs: Sequence[Tensor | None], inputs: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    (do, _), (o, lse) = douts, outs
    assert do is not None
    assert o is not None
    assert lse is not None
    return attend_strips_backward(do, o, lse, *inputs)


# o [B, H·G, T, E] and the log-sum-exp of every row [B, H·G, T], for one head size D = E.
softmax_attention_op = custom_op.register(
    "softmax_attention",
    "Tensor q, Tensor k, Tensor y, Tensor? key_mask, Tensor? cu_seqlens, float scale",
    2,
    forward=attend_strips,
    backward=_backward,
    shapes=_shapes,
    differentiable=3,
    auxiliary=(1,),
    unbatched=("cu_seqlens",),
    about="the softmax read-out under padding, a past or packed documents",
)


def softmax_weights(
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The dense weights of the read-out, [B, H·G, T, S + T]: for the reference and for analysis. Quadratic memory."""
    B, T, total = q.shape[0], q.shape[2], k.shape[2]
    scale = resolved_scale(scale, q)
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale
    visible = visible_keys(B, T, total, key_mask, cu_seqlens, q.device)
    none = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~(visible | none), -math.inf).softmax(-1)
    return weights.masked_fill(none, 0)


def visible_keys(
    B: int, T: int, total: int, key_mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor:
    """[B, 1, T, S + T]: which keys each query may read. Quadratic memory."""
    key = torch.arange(total, device=device)
    query = key[total - T :, None]
    visible = (key <= query).expand(B, 1, T, total)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    if cu_seqlens is not None:
        document = packing.document_numbers(cu_seqlens, key)
        visible = visible & (document == document[total - T :, None])
    return visible
