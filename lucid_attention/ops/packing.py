"""Packed documents and rows with masked positions, cut into parts that can be computed as ordinary batches.

A long document is a view of its own. Short documents of similar length are gathered into one batch, padded on the
right: what is causal never looks there, and thousands of short documents do not cost thousands of small calls.
Where a masked position must be as if it were not there, the others are gathered in the same way.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Documents up to this length are batched; above it a call of its own costs little next to the work.
SHORT = 256


class Part(Protocol):
    """Documents, or rows without their masked positions, that are computed together."""

    def take(self, x: Tensor) -> Tensor:
        """[B, H, T, *] -> [B · documents, H, L, *] or, for a mask, [B, T] -> [B · documents, L]."""

    def scratch(self, x: Tensor) -> Tensor:
        """An uninitialised tensor in the shape of `take(x)`, to be written and handed to `put_`."""

    def put_(self, out: Tensor, part: Tensor) -> None:
        """Write what `take` would read."""

    def take_grad(self, x: Tensor) -> Tensor:
        """`take`, with zeros where a shorter document of the batch has ended."""


class LongDocument:
    def __init__(self, start: int, stop: int) -> None:
        self.where = slice(start, stop)

    def take(self, x: Tensor) -> Tensor:
        return x[:, self.where] if x.ndim == 2 else x[:, :, self.where]

    # Nothing to gather: a view serves for reading and for writing in place.
    take_grad = scratch = take

    def put_(self, out: Tensor, part: Tensor) -> None:
        here = self.take(out)
        if here.data_ptr() != part.data_ptr():
            here.copy_(part)


class ShortDocuments:
    def __init__(self, starts: list[int], stops: list[int], device: torch.device) -> None:
        begin = torch.tensor(starts, device=device)
        end = torch.tensor(stops, device=device)
        length = max(b - a for a, b in zip(starts, stops, strict=True))
        index = begin[:, None] + torch.arange(length, device=device)
        self.inside = index < end[:, None]
        self.index = torch.minimum(index, end[:, None] - 1)

    def take(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x[:, self.index].flatten(0, 1)
        return x[:, :, self.index].transpose(1, 2).flatten(0, 1)

    def take_grad(self, x: Tensor) -> Tensor:
        taken = self.take(x)
        outside = ~self.inside.repeat(taken.shape[0] // self.inside.shape[0], 1)
        return taken.masked_fill_(outside.view(outside.shape[0], 1, -1, *[1] * (taken.ndim - 3)), 0)

    def scratch(self, x: Tensor) -> Tensor:
        B, H, _, *features = x.shape
        documents, length = self.index.shape
        return x.new_empty(B * documents, H, length, *features)

    def put_(self, out: Tensor, part: Tensor) -> None:
        rows = part.unflatten(0, (out.shape[0], -1)).transpose(1, 2)
        out[:, :, self.index[self.inside]] = rows[:, :, self.inside]


def offsets(cu_seqlens: Tensor, length: int) -> list[int]:
    """The document borders as a list; raises if they do not cover [0, length) in order."""
    borders: list[int] = cu_seqlens.tolist()
    rule = f"cu_seqlens must rise from 0 to T = {length} without falling"
    if borders[0] != 0:
        raise ValueError(f"{rule}: expected cu_seqlens[0] = 0, got {borders[0]}")
    if borders[-1] != length:
        raise ValueError(f"{rule}: expected cu_seqlens[-1] = {length}, got {borders[-1]}")
    for i, (a, b) in enumerate(pairwise(borders)):
        if a > b:
            raise ValueError(f"{rule}: got cu_seqlens[{i}] = {a} before cu_seqlens[{i + 1}] = {b}")
    return borders


def parts(cu_seqlens: Tensor, length: int) -> Iterator[Part]:
    """All documents, each in exactly one part. Empty documents vanish."""
    borders = offsets(cu_seqlens, length)
    short: dict[int, tuple[list[int], list[int]]] = {}
    for start, stop in pairwise(borders):
        if stop - start > SHORT:
            yield LongDocument(start, stop)
        elif stop > start:
            # One batch per power of two: padding at most doubles a document.
            starts, stops = short.setdefault((stop - start - 1).bit_length(), ([], []))
            starts.append(start)
            stops.append(stop)
    for starts, stops in short.values():
        yield ShortDocuments(starts, stops, cu_seqlens.device)


class KeptPositions:
    """Sequences of kept positions of some rows, gathered to the front: take gives [sequences, H, L, *]."""

    def __init__(self, rows: list[int], kept: list[Tensor], device: torch.device) -> None:
        length = max(positions.shape[0] for positions in kept)
        index = torch.stack([F.pad(positions, (0, length - positions.shape[0]), value=-1) for positions in kept])
        self.inside = (index >= 0).to(device)
        # What stands behind the end of a sequence is computed with it and dropped: its last position is as good as any.
        self.index = torch.where(index >= 0, index, index.amax(1, keepdim=True)).to(device)
        self.rows = torch.tensor(rows, device=device)[:, None]

    def take(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.index].transpose(1, 2)

    def take_grad(self, x: Tensor) -> Tensor:
        taken = self.take(x)
        return taken.masked_fill_(~self.inside.view(self.inside.shape[0], 1, -1, *[1] * (taken.ndim - 3)), 0)

    def scratch(self, x: Tensor) -> Tensor:
        sequences, length = self.index.shape
        return x.new_empty(sequences, x.shape[1], length, *x.shape[3:])

    def put_(self, out: Tensor, part: Tensor) -> None:
        rows = self.rows.expand_as(self.index)[self.inside]
        out[rows, :, self.index[self.inside]] = part.transpose(1, 2)[self.inside]


def kept_parts(key_mask: Tensor, cu_seqlens: Tensor | None) -> Iterator[Part]:
    """All kept positions of key_mask: [B, T], those of a row or a document in sequence. Nothing kept: no part."""
    mask = key_mask.cpu()
    borders = [0, mask.shape[1]] if cu_seqlens is None else offsets(cu_seqlens, mask.shape[1])
    batches: dict[int, tuple[list[int], list[Tensor]]] = {}
    for row in range(mask.shape[0]):
        for start, stop in pairwise(borders):
            kept = mask[row, start:stop].nonzero()[:, 0] + start
            length = kept.shape[0]
            if length > SHORT:
                yield KeptPositions([row], [kept], key_mask.device)
            elif length:
                rows, sequences = batches.setdefault((length - 1).bit_length(), ([], []))
                rows.append(row)
                sequences.append(kept)
    for rows, sequences in batches.values():
        yield KeptPositions(rows, sequences, key_mask.device)


def kept_rows(key_mask: Tensor, past: int) -> Iterator[tuple[Part, Part | None]]:
    """For every row of key_mask: [B, S + T] its kept new positions and, None if there are none, its kept past ones."""
    mask = key_mask.cpu()
    for row in range(mask.shape[0]):
        old, new = mask[row, :past].nonzero()[:, 0], mask[row, past:].nonzero()[:, 0]
        if new.shape[0]:
            before = KeptPositions([row], [old], key_mask.device) if old.shape[0] else None
            yield KeptPositions([row], [new], key_mask.device), before
