"""Chunk-wise computing for states of fixed size: chunks as batches, states from chunk to chunk, decays within a chunk.

Letters beyond the usual: n = B · H heads, N chunks of C tokens each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Measured on a CPU for D = 64: loops over smaller chunks cost more, and so do products within larger ones.
CHUNK = 64
# Tokens of all heads that are computed at once: on a CPU, as many as its cache holds.
CPU_SEGMENT = 4 * 1024
ACCELERATOR_SEGMENT = 1024 * 1024


def in_segments(
    attend: Callable[..., tuple[Tensor, Any]], tensors: Sequence[Tensor | None], state: Any
) -> tuple[Tensor, Any]:
    """`attend(*tensors, state)`, one segment of the sequence after another. tensors: [B, H, T, ...] or None.

    The tensors between chunks then do not grow with the sequence, and the time per token stays constant.
    """
    first = next(x for x in tensors if x is not None)
    B, H, T = first.shape[:3]
    budget = CPU_SEGMENT if first.device.type == "cpu" else ACCELERATOR_SEGMENT
    length = max(1, budget // (B * H * CHUNK)) * CHUNK
    if length >= T:
        return attend(*tensors, state)
    o = []
    for segment in along(tensors, lambda x: x.split(length, 2)):
        read, state = attend(*segment, state)
        o.append(read)
    return torch.cat(o, 2), state


def along(tensors: Sequence[Tensor | None], take_apart: Callable[[Tensor], Sequence[Tensor]]) -> list[tuple[Any, ...]]:
    """Tensors taken apart in the same way, piece by piece; None stays None.

    Each tensor is taken apart in one call: the gradient of a slice is as large as its tensor, so a loop of slices would
    take quadratic time.
    """
    columns = [None if x is None else take_apart(x) for x in tensors]
    pieces = next(len(column) for column in columns if column is not None)
    return list(zip(*([None] * pieces if column is None else column for column in columns), strict=True))


def chunk_length(T: int) -> int:
    """A power of two, so that a chunk can be halved down to single tokens."""
    return min(CHUNK, 1 << (T - 1).bit_length())


def cut(x: Tensor, C: int) -> Tensor:
    """[B, H, T, ...] -> [n, N, C, ...], zeros behind the end: a token of zeros leaves every state as it is."""
    x = x.flatten(0, 1)
    missing = -x.shape[1] % C
    if missing:
        x = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, missing))
    return x.unflatten(1, (-1, C)).contiguous()


def join(x: Tensor, B: int, T: int) -> Tensor:
    """[n, N, C, ...] -> [B, H, T, ...]: undo `cut`."""
    return x.flatten(1, 2)[:, :T].unflatten(0, (B, -1))


def carry(state: Tensor, decay: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """state ← decay · state + write along the chunks: the states before each chunk [n, N, D, E], and the last one.

    state: [n, D, E]; decay: [n, N, D, 1] or [n, N, 1, E]; write: [n, N, D, E].
    """
    before = []
    for a, w in zip(decay.unbind(1), write.unbind(1), strict=True):
        before.append(state)
        state = torch.addcmul(w, a, state)
    return torch.stack(before, 1), state
