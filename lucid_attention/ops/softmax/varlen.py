"""The read-out of packed documents, and behind a past, by torch's flash kernel for sequences of different lengths.

CUDA and ROCm, 16 bit, no masked keys. No mask is made, nothing is read on the host, and torch has its backward.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The kernel's largest head size, and what a head size must be a multiple of.
LARGEST, MULTIPLE = 256, 8
CAUSAL = (-1, 0)


@cache
def _kernel() -> Any:
    """`torch.nn.attention.varlen.varlen_attn`, or None where torch has none with the options that are needed."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= inspect.signature(varlen_attn).parameters.keys() else None


def can_read(q: Tensor, key_mask: Tensor | None) -> bool:
    """Whether the kernel takes queries like q. Rows with masked keys stay with strips: there a masked query reads."""
    return (
        key_mask is None
        and q.device.type == "cuda"
        and q.element_size() == 2
        and q.shape[3] <= LARGEST
        and _kernel() is not None
    )


def read(q: Tensor, k: Tensor, y: Tensor, cu_seqlens: Tensor | None, scale: float) -> Tensor:
    """o: [B, H·G, T, D] for q: [B, H·G, T, D] and k, y: [B, H, S + T, D], one head size; documents have B = 1."""
    B, _, T, D = q.shape
    total, rest = k.shape[2], -D % MULTIPLE
    # A row is a sequence. Queries are the last T of S + T positions, which is where the kernel puts its diagonal.
    if cu_seqlens is None:
        row = torch.arange(B + 1, dtype=torch.int32, device=q.device)
        queries, keys = row * T, row * total
    else:
        queries = keys = cu_seqlens.to(torch.int32)
    flat = [F.pad(x, (0, rest)).transpose(1, 2).flatten(0, 1) for x in (q, k, y)]
    o: Tensor = _kernel()(
        *flat, queries, keys, T, total, scale=scale, window_size=CAUSAL, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.unflatten(0, (B, T)).transpose(1, 2)[..., :D]
