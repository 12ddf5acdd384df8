"""The read-out under padding, of packed documents and behind a past by torch's flash kernel for different lengths.

CUDA and ROCm, 16 bit. No mask is made, nothing is read on the host, and torch has its backward. A masked key is hidden
by one more feature: a in every query, −b in masked keys and 0 in the others, so that its score falls by a · b · scale,
which leaves it a weight of exactly 0. Its value is zero too, so a query that sees masked keys only reads zero. The
largest head size, 256, has no room for the feature: there masked keys stay with strips.
"""

import inspect
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import on_device
from ..precision import working_dtype
from .strips import clean

# The kernel's largest head size, and what a head size must be a multiple of.
LARGEST, MULTIPLE = 256, 8
CAUSAL = (-1, 0)
# A masked key's score is at most −2^22: low enough, and its rounding in float32 makes no exponential infinite.
DEEP = 22
# Powers of two that a feature of the dtype can hold: their product is a · b.
MOST = {torch.float16: 30, torch.bfloat16: 120}
# Scores of visible keys up to here are told from those of masked ones.
LARGEST_SCORE = 2.0 ** (DEEP - 1)


@cache
def _kernel() -> Any:
    """`torch.nn.attention.varlen.varlen_attn`, or None where torch has none with the options that are needed."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= inspect.signature(varlen_attn).parameters.keys() else None


def can_read(q: Tensor, key_mask: Tensor | None, scale: float) -> bool:
    """Whether the kernel takes queries like q: [B, H·G, T, D]."""
    size = q.shape[3] if key_mask is None else q.shape[3] + 1
    return (
        q.device.type == "cuda"
        and q.element_size() == 2
        and size <= LARGEST
        and (key_mask is None or _depth(scale) <= MOST[q.dtype])
        and _kernel() is not None
    )


def read(q: Tensor, k: Tensor, y: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, scale: float) -> Tensor:
    """o: [B, H·G, T, D] for q: [B, H·G, T, D] and k, y: [B, H, S + T, D], one head size; documents have B = 1."""
    if key_mask is None:
        return _read(q, k, y, cu_seqlens, scale)
    q, k, y = clean(q, k, y, key_mask)
    depth = _depth(scale)
    hiding = torch.where(key_mask, 0.0, -(2.0 ** (depth // 2))).to(k.dtype)[:, None, :, None]
    wide_q = F.pad(q, (0, 1), value=2.0 ** (depth - depth // 2))
    wide_k = torch.cat([k, hiding.expand(-1, k.shape[1], -1, -1)], -1)
    o = _read(wide_q, wide_k, F.pad(y, (0, 1)), cu_seqlens, scale)[..., :-1]
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


def _read(q: Tensor, k: Tensor, y: Tensor, cu_seqlens: Tensor | None, scale: float) -> Tensor:
    B, _, T, D = q.shape
    total, rest = k.shape[2], -D % MULTIPLE
    # A row is a sequence. Queries are the last T of S + T positions, which is where the kernel puts its diagonal.
    if cu_seqlens is None:
        row = torch.arange(B + 1, dtype=torch.int32, device=q.device)
        queries, keys = row * T, row * total
    else:
        queries = keys = on_device(cu_seqlens.to(torch.int32), q.device)
    flat = [F.pad(x, (0, rest)).transpose(1, 2).flatten(0, 1) for x in (q, k, y)]
    o: Tensor = _kernel()(
        *flat, queries, keys, T, total, scale=scale, window_size=CAUSAL, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.unflatten(0, (B, T)).transpose(1, 2)[..., :D]
