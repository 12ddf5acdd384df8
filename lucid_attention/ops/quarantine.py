"""NaN and infinities stay in their packed document.

Kernels that compute all documents at once multiply across their borders by zero, and 0 · NaN is NaN. So positions that
hold such numbers are computed as zeros, and NaN is written to what their document gets: to outputs from the position
on, to the gradients of the whole document. Nothing is read on the host.
"""

import math
from collections.abc import Iterable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor

from . import packing

Given = TypeVar("Given", Tensor, Tensor | None)


class Quarantine:
    """Of tensors [B, H, T], [B, H, T, *] or, with H·G heads, of queries; all [B, H, T].

    broken: positions that hold NaN or infinities; behind: those, and what follows them in their document; documents:
    all positions of their documents. Masked positions may hold anything.
    """

    def __init__(self, tensors: Iterable[Tensor | None], H: int, key_mask: Tensor | None, cu_seqlens: Tensor) -> None:
        found = [_not_finite(x, H) for x in tensors if x is not None]
        broken = found[0]
        for each in found[1:]:
            broken = broken | each
        if key_mask is not None:
            broken = broken & key_mask[:, None]
        T = broken.shape[2]
        start, end = packing.document_bounds(cu_seqlens, T, T, broken.device)
        count = F.pad(broken.int().cumsum(2), (1, 0))
        before = count.index_select(2, start)
        self.broken, self.behind = broken, count[:, :, 1:] > before
        self.documents = count.index_select(2, end) > before


def _not_finite(x: Tensor, H: int) -> Tensor:
    found = ~x.isfinite()
    found = found.any(-1) if x.ndim == 4 else found
    return found.unflatten(1, (H, -1)).any(2)


def zeros_at(x: Given, where: Tensor) -> Given:
    """x: [B, H·G, T] or [B, H·G, T, *] with zeros at `where`: [B, H, T]."""
    return x if x is None else x.masked_fill(_heads_of(x, where), 0)


def nan_at(x: Given, where: Tensor) -> Given:
    """As `zeros_at`, with NaN."""
    return x if x is None else x.masked_fill(_heads_of(x, where), math.nan)


def _heads_of(x: Tensor, where: Tensor) -> Tensor:
    where = where.repeat_interleave(x.shape[1] // where.shape[1], 1)
    return where[..., None] if x.ndim == 4 else where
