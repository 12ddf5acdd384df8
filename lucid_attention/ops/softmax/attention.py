"""The softmax read-out o = softmax(q kᵀ · scale + causal) y, on `scaled_dot_product_attention`.

Queries are the last T of S + T positions. Plain causal attention goes straight to torch. What torch can only do with a
T × T mask (padding, a cached past, packed documents) runs as an operator of ours over strips of queries, so that
memory stays linear in the length, forward and backward; on a GPU, in 16 bit, they go to torch's varlen kernel (below).
"""

import inspect
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import custom_op, packing
from ..blocks import Block, as_inputs, is_causal, numbers
from ..custom_op import refuse_forward_mode
from ..keys import resolved_scale
from ..packing import on_device
from ..precision import readout_dtype, working_dtype
from . import fused_step
from .one_token import Token
from .strips import attend_strips, attend_strips_backward, clean, grouped_sdpa


def softmax_attention(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    block: Block = 1,
) -> Tensor:
    """Read y by softmax attention.

    q: [B, H·G, T, D]; k: [B, H, S + T, D]; y: [B, H, S + T, E]; key_mask: [B, S + T] -> [B, H·G, T, E]. A query that
    sees no key reads zero. block: 1 for causal attention, else the blocks of tokens that see each other.
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
    if plain and total == T and is_causal(block):
        o = grouped_sdpa(q, k, y, scale, causal=True)
    elif plain and (block is None or T == 1):
        o = grouped_sdpa(q, k, y, scale)
    elif is_causal(block) and varlen_can_read(q, key_mask, scale):
        o = varlen_read(q, k, y, key_mask, cu_seqlens, scale)
    else:
        refuse_forward_mode(q, k, y)
        o = softmax_attention_op.forward(q, k, y, key_mask, cu_seqlens, scale, *as_inputs(block))[0]
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


def _shapes(q: Tensor, k: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
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
    "Tensor q, Tensor k, Tensor y, Tensor? key_mask, Tensor? cu_seqlens, float scale, Tensor? borders, int block",
    2,
    forward=attend_strips,
    backward=_backward,
    shapes=_shapes,
    differentiable=3,
    auxiliary=(1,),
    unbatched=("cu_seqlens", "borders"),
    about="the softmax read-out under padding, a past or packed documents",
)


def softmax_weights(
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    block: Block = 1,
) -> Tensor:
    """The dense weights of the read-out, [B, H·G, T, S + T]: for the reference and for analysis. Quadratic memory."""
    B, T, total = q.shape[0], q.shape[2], k.shape[2]
    scale = resolved_scale(scale, q)
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * scale
    visible = visible_keys(B, T, total, key_mask, cu_seqlens, q.device, block)
    none = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~(visible | none), -math.inf).softmax(-1)
    return weights.masked_fill(none, 0)


def visible_keys(
    B: int,
    T: int,
    total: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    device: torch.device,
    block: Block = 1,
) -> Tensor:
    """[B, 1, T, S + T]: which keys each query may read. Quadratic memory."""
    key = torch.arange(total, device=device)
    query = key[total - T :, None]
    visible = key <= query
    if not is_causal(block):
        number = numbers(block, T, cu_seqlens, device)
        visible = visible | F.pad(number == number[:, None], (total - T, 0))
    visible = visible.expand(B, 1, T, total)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    if cu_seqlens is not None:
        document = packing.document_numbers(cu_seqlens, key)
        visible = visible & (document == document[total - T :, None])
    return visible


# Varlen attention with padding, packing and cache: torch's flash kernel for sequences of different lengths, on CUDA and
# ROCm in 16 bit. No mask is made, nothing is read on the host, and torch has its backward. One more feature hides a
# masked key: a in every query, −b in masked keys and 0 in the others, so that its score falls by a · b · scale and its
# weight is exactly 0. Its value is zero too, so a query that sees masked keys only reads zero. The largest head size,
# 256, has no room for the feature: there masked keys stay with strips.

# The kernel's largest head size, and what a head size must be a multiple of.
LARGEST_SIZE, SIZE_MULTIPLE = 256, 8
CAUSAL = (-1, 0)
# A masked key's score is at most −2^22: low enough, and its rounding in float32 makes no exponential infinite.
DEEP = 22
# Powers of two that a feature of the dtype can hold: their product is a · b.
LARGEST_POWER = {torch.float16: 30, torch.bfloat16: 120}
# Scores of visible keys up to this value can be distinguished from those of masked ones.
LARGEST_SCORE = 2.0 ** (DEEP - 1)


@cache
def _varlen_kernel() -> Any:
    """`torch.nn.attention.varlen.varlen_attn`, or None where torch has none with the options that are needed."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= inspect.signature(varlen_attn).parameters.keys() else None


def varlen_can_read(q: Tensor, key_mask: Tensor | None, scale: float) -> bool:
    """Whether the kernel takes queries like q: [B, H·G, T, D]."""
    size = q.shape[3] if key_mask is None else q.shape[3] + 1
    return (
        q.device.type == "cuda"
        and q.element_size() == 2
        and size <= LARGEST_SIZE
        and (key_mask is None or _depth(scale) <= LARGEST_POWER[q.dtype])
        and _varlen_kernel() is not None
    )


def varlen_read(
    q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> Tensor:
    """o: [B, H·G, T, D] for q: [B, H·G, T, D] and k, y: [B, H, S + T, D], one head size; documents have B = 1."""
    if key_mask is None:
        return _read_varlen(q, k, y, cu_seqlens, scale)
    q, k, y = clean(q, k, y, key_mask)
    depth = _depth(scale)
    hiding = torch.where(key_mask, 0.0, -(2.0 ** (depth // 2))).to(k.dtype)[:, None, :, None]
    wide_q = F.pad(q, (0, 1), value=2.0 ** (depth - depth // 2))
    wide_k = torch.cat([k, hiding.expand(-1, k.shape[1], -1, -1)], -1)
    o = _read_varlen(wide_q, wide_k, F.pad(y, (0, 1)), cu_seqlens, scale)[..., :-1]
    return o.masked_fill(_too_large(q, k, scale)[..., None], math.nan)


def _depth(scale: float) -> int:
    """The exponent of a · b."""
    return DEEP + math.ceil(-math.log2(scale))


def _too_large(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, H·G, T]: whether a query may have visible scores as low as those of masked keys; it reads NaN."""
    with torch.no_grad():
        rows, keys = (torch.linalg.vector_norm(x, dim=-1, dtype=working_dtype(x)) for x in (q, k))
        # Infinite keys make NaN of their own queries, and of no others.
        largest = keys.masked_fill(~keys.isfinite(), 0).cummax(2).values[:, :, -q.shape[2] :]
        return rows * largest.repeat_interleave(q.shape[1] // k.shape[1], 1) * scale > LARGEST_SCORE


def _read_varlen(q: Tensor, k: Tensor, y: Tensor, cu_seqlens: Tensor | None, scale: float) -> Tensor:
    B, _, T, D = q.shape
    total, rest = k.shape[2], -D % SIZE_MULTIPLE
    # A row is a sequence. Queries are the last T of S + T positions, which is where the kernel puts its diagonal.
    if cu_seqlens is None:
        row = torch.arange(B + 1, dtype=torch.int32, device=q.device)
        queries, keys = row * T, row * total
    else:
        queries = keys = on_device(cu_seqlens.to(torch.int32), q.device)
    flat = [F.pad(x, (0, rest)).transpose(1, 2).flatten(0, 1) for x in (q, k, y)]
    o: Tensor = _varlen_kernel()(
        *flat, queries, keys, T, total, scale=scale, window_size=CAUSAL, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.unflatten(0, (B, T)).transpose(1, 2)[..., :D]
