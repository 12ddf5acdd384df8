"""The softmax read-out o = softmax(q kᵀ · scale + causal) y, on `scaled_dot_product_attention`.

Queries are the last T of S + T positions. Plain causal attention goes straight to torch. What torch can only do with a
T × T mask (padding, a cached past, packed documents) runs as an operator of ours over strips of queries, so that
memory stays linear in the length, forward and backward.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..folding import fold_vmap
from ..forward_mode import refuse_forward_mode
from ..precision import read_out_dtype
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
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, y = _under_autocast(q, k, y)
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
    else:
        refuse_forward_mode(q, k, y)
        o = softmax_attention_op(q, k, y, key_mask, cu_seqlens, scale)[0]
    return o[..., :E]


def _under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for `scaled_dot_product_attention`: our own operator must not differ from it."""
    return tuple(x.to(read_out_dtype(x)) for x in tensors)


@torch.library.custom_op("lucid_attention::softmax_attention", mutates_args=())
def softmax_attention_op(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """o [B, H·G, T, E] and the log-sum-exp of every row [B, H·G, T], for one head size D = E."""
    return attend_strips(q, k, y, key_mask, cu_seqlens, scale)


@softmax_attention_op.register_fake
def _(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return _outputs(q, y)


def _outputs(q: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], y.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


@torch.library.custom_op("lucid_attention::softmax_attention_backward", mutates_args=())
def softmax_attention_backward_op(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    y: Tensor,
    o: Tensor,
    lse: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return attend_strips_backward(do, q, k, y, o, lse, key_mask, cu_seqlens, scale)


@softmax_attention_backward_op.register_fake
def _(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    y: Tensor,
    o: Tensor,
    lse: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), y.new_empty(y.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, y, key_mask, cu_seqlens, ctx.scale = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, y, o, lse, key_mask, cu_seqlens)


def _pull_back(ctx: Any, do: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dy = softmax_attention_backward_op(do, *ctx.saved_tensors, ctx.scale)
    return dq, dk, dy, None, None, None


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "lucid_attention: the softmax read-out under padding, a past or packed documents has no second derivative. "
        "Use impl='reference' for double backward"
    )


softmax_attention_op.register_autograd(_pull_back, setup_context=_remember)
softmax_attention_backward_op.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
fold_vmap(softmax_attention_op, unbatched=("cu_seqlens",))
fold_vmap(softmax_attention_backward_op, unbatched=("cu_seqlens",))


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
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
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
        document = torch.searchsorted(cu_seqlens[1:].contiguous(), key, right=True)
        visible = visible & (document == document[total - T :, None])
    return visible
