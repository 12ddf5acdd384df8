"""Packed documents and rows with masked positions, cut into parts that are computed as ordinary batches.

A long document is a view. Short documents of similar length are gathered into one batch and padded on the right:
causal operators never look there, and thousands of short documents do not cost thousands of small calls. Where a
masked position must be absent, the kept positions are gathered in the same way.

The lengths of documents decide about shapes, so borders and masks are read on the host: one wait for the device if they
are there, and none for borders on the CPU. Everything else is sent to the device without waiting for it.

`pieces` is the one loop over parts. A row without documents or masked positions is one part, `Span()`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)

# Documents up to this length are batched. The call for a longer document costs little next to its work.
SHORT = 256


class Part(Protocol):
    """Sequences that are computed as one batch: documents, or rows without their masked positions."""

    @property
    def past(self) -> "Part | None":
        """The positions of the past that belong to these sequences."""

    def take(self, x: Tensor) -> Tensor:
        """[B, H, T, *] -> [sequences, H, L, *] or, for a mask and documents, [B, T] -> [sequences, L]."""

    def take_grad(self, x: Tensor) -> Tensor:
        """`take`, with zeros after the end of a shorter sequence."""

    def scratch(self, x: Tensor) -> Tensor:
        """An uninitialised tensor in the shape of `take(x)`, to be written and passed to `put_`."""

    def put_(self, out: Tensor, part: Tensor) -> None:
        """Write into `out` what `take` would read."""

    def per_sequence(self, x: Tensor) -> Tensor:
        """[B, H] -> [sequences, H]: repeat the value of a row for each of its sequences."""

    def add_sequences_(self, out: Tensor, part: Tensor) -> None:
        """Add [sequences, H] to the rows of `out`: [B, H]."""


class Span:
    """Positions [start, stop) of every row, as views. Without a stop: all positions, and all of the past."""

    def __init__(self, start: int = 0, stop: int | None = None) -> None:
        self.where = slice(start, stop)

    @property
    def past(self) -> "Span | None":
        return self if self.where.stop is None else None

    def take(self, x: Tensor) -> Tensor:
        return x[:, self.where] if x.ndim == 2 else x[:, :, self.where]

    take_grad = scratch = take

    def put_(self, out: Tensor, part: Tensor) -> None:
        target = self.take(out)
        if target.data_ptr() != part.data_ptr():
            target.copy_(part)

    def per_sequence(self, x: Tensor) -> Tensor:
        return x

    def add_sequences_(self, out: Tensor, part: Tensor) -> None:
        out += part


class ShortDocuments:
    """Documents of every row, gathered and padded to one length."""

    past = None

    def __init__(self, starts: list[int], stops: list[int], device: torch.device) -> None:
        lengths = [b - a for a, b in zip(starts, stops, strict=True)]
        begin, end = on_device(torch.tensor([starts, stops]), device)
        index = begin[:, None] + torch.arange(max(lengths), device=device)
        self.inside = index < end[:, None]
        self.index = torch.minimum(index, end[:, None] - 1)
        # Every token by its document and its place in it.
        if device.type == "cpu":
            self.document, self.place = self.inside.nonzero(as_tuple=True)
        else:
            # The same without waiting for the number of tokens.
            count, total = end - begin, sum(lengths)
            self.document = torch.arange(len(lengths), device=device).repeat_interleave(count, output_size=total)
            self.place = torch.arange(total, device=device) - (count.cumsum(0) - count)[self.document]
        self.position = begin[self.document] + self.place

    def take(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            # Padding is masked: a causal operator never looks there, but a block of tokens that see each other does.
            return (x[:, self.index] & self.inside).flatten(0, 1)
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
        out[:, :, self.position] = rows[:, :, self.document, self.place]

    def per_sequence(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.index.shape[0], 0)

    def add_sequences_(self, out: Tensor, part: Tensor) -> None:
        out += part.unflatten(0, (out.shape[0], -1)).sum(1)


class KeptPositions:
    """Sequences of unmasked positions: row `rows[i]` at positions `kept[i]`, padded to one length."""

    def __init__(
        self, rows: list[int], kept: list[Tensor], device: torch.device, past: "KeptPositions | None" = None
    ) -> None:
        length = max(positions.shape[0] for positions in kept)
        index = torch.stack([F.pad(positions, (0, length - positions.shape[0]), value=-1) for positions in kept])
        self.past = past
        inside, row = index >= 0, torch.tensor(rows)[:, None]
        sequence, place = inside.nonzero(as_tuple=True)
        tokens = torch.stack([sequence, place, row[sequence, 0], index[sequence, place]])
        self.sequence, self.place, self.row, self.position = on_device(tokens, device)
        self.inside = on_device(inside, device)
        # Padding repeats the last position of a sequence. Its results are dropped.
        self.index = on_device(torch.where(inside, index, index.amax(1, keepdim=True)), device)
        self.rows = on_device(row, device)

    def take(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.index].transpose(1, 2)

    def take_grad(self, x: Tensor) -> Tensor:
        taken = self.take(x)
        return taken.masked_fill_(~self.inside.view(self.inside.shape[0], 1, -1, *[1] * (taken.ndim - 3)), 0)

    def scratch(self, x: Tensor) -> Tensor:
        sequences, length = self.index.shape
        return x.new_empty(sequences, x.shape[1], length, *x.shape[3:])

    def put_(self, out: Tensor, part: Tensor) -> None:
        out[self.row, :, self.position] = part[self.sequence, :, self.place]

    def per_sequence(self, x: Tensor) -> Tensor:
        return x[self.rows[:, 0]]

    def add_sequences_(self, out: Tensor, part: Tensor) -> None:
        out.index_add_(0, self.rows[:, 0], part)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`, sent there without waiting for the device."""
    if x.device == device:
        return x
    if device.type == "cuda" and x.device.type == "cpu" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def document_numbers(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """The number of the document that each position belongs to, in the shape of `positions`."""
    borders = on_device(cu_seqlens, positions.device)
    return torch.searchsorted(borders[1:].contiguous(), positions.to(borders.dtype), right=True)


Pieces = list[Tensor | None]


def pieces(
    parts: Iterable[Part], outputs: Sequence[Tensor | None], past_outputs: Sequence[Tensor | None] = ()
) -> Iterator[tuple[Part, Pieces, Pieces]]:
    """Each part with tensors to be written, one for each of `outputs` and `past_outputs` (None for None).

    What the loop's body wrote is put into the outputs when the loop goes on. past_outputs: [B, H, S, *].
    """
    for part in parts:
        new = [None if x is None else part.scratch(x) for x in outputs]
        old = [None if x is None or part.past is None else part.past.scratch(x) for x in past_outputs]
        yield part, new, old
        for owner, wholes, written in ((part, outputs, new), (part.past, past_outputs, old)):
            for whole, piece in zip(wholes, written, strict=True):
                if owner is not None and whole is not None and piece is not None:
                    owner.put_(whole, piece)


def offsets(cu_seqlens: Tensor, length: int, name: str = "cu_seqlens") -> list[int]:
    """The borders of documents (or of blocks) as a list; raises if they do not cover [0, length) in order."""
    borders: list[int] = cu_seqlens.tolist()
    rule = f"{name} must rise from 0 to T = {length} without falling"
    if borders[0] != 0:
        raise ValueError(f"{rule}: expected {name}[0] = 0, got {borders[0]}")
    if borders[-1] != length:
        raise ValueError(f"{rule}: expected {name}[-1] = {length}, got {borders[-1]}")
    for i, (a, b) in enumerate(pairwise(borders)):
        if a > b:
            raise ValueError(f"{rule}: got {name}[{i}] = {a} before {name}[{i + 1}] = {b}")
    return borders


def document_bounds(cu_seqlens: Tensor, length: int, padded: int, device: torch.device) -> Tensor:
    """[2, padded] int32: where the document of each position starts and ends; positions after `length` are one more.

    Nothing waits for a GPU: there the values of `cu_seqlens` are checked asynchronously.
    """
    if cu_seqlens.device.type == "cpu":
        offsets(cu_seqlens, length)
    else:
        rises = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
        torch._assert_async(rises, f"cu_seqlens must rise from 0 to T = {length} without falling")
    borders = on_device(cu_seqlens, device)
    position = torch.arange(padded, device=device, dtype=borders.dtype)
    document = torch.searchsorted(borders[1:].contiguous(), position, right=True)
    borders = torch.cat([borders, borders.new_full((1,), padded)])
    return torch.stack([borders[document], borders[document + 1]]).clamp(0, padded).to(torch.int32)


def documents(cu_seqlens: Tensor | None, length: int, device: torch.device) -> Iterator[Part]:
    """All documents, each in exactly one part. Empty documents vanish. Without borders: everything.

    device: of the tensors that are cut.
    """
    if cu_seqlens is None:
        yield Span()
        return
    short: dict[int, tuple[list[int], list[int]]] = {}
    for start, stop in pairwise(offsets(cu_seqlens, length)):
        if stop - start > SHORT:
            yield Span(start, stop)
        elif stop > start:
            # One batch per power of two: padding at most doubles a document.
            starts, stops = short.setdefault((stop - start - 1).bit_length(), ([], []))
            starts.append(start)
            stops.append(stop)
    for starts, stops in short.values():
        yield ShortDocuments(starts, stops, device)


def kept_positions(
    key_mask: Tensor | None, cu_seqlens: Tensor | None, length: int, past: int, device: torch.device
) -> Iterator[Part]:
    """All unmasked positions, those of a row or a document in sequence. Nothing kept: no part.

    key_mask: [B, S + T] with S = `past` and T = `length`; a past excludes documents.
    """
    if key_mask is None:
        yield from documents(cu_seqlens, length, device)
    elif past:
        yield from _kept_with_past(key_mask, past)
    else:
        yield from _kept(key_mask, cu_seqlens)


def _kept(key_mask: Tensor, cu_seqlens: Tensor | None) -> Iterator[Part]:
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


def _kept_with_past(key_mask: Tensor, past: int) -> Iterator[Part]:
    mask = key_mask.cpu()
    for row in range(mask.shape[0]):
        old, new = mask[row, :past].nonzero()[:, 0], mask[row, past:].nonzero()[:, 0]
        if new.shape[0]:
            before = KeptPositions([row], [old], key_mask.device) if old.shape[0] else None
            yield KeptPositions([row], [new], key_mask.device, before)


class NonFinite:
    """Positions of tensors [B, H, T], [B, H, T, *] or [B, H·G, T, *] that hold NaN or infinities, as masks [B, H, T].

    Kernels that compute all documents at once multiply across their borders by zero, and 0 · NaN is NaN. So these
    positions are computed as zeros, and NaN is written afterwards: to outputs from the position on (`after`), to the
    gradients of the whole document (`documents`). Masked positions are ignored. Nothing is read on the host.
    """

    def __init__(self, tensors: Iterable[Tensor | None], H: int, key_mask: Tensor | None, cu_seqlens: Tensor) -> None:
        found = [_not_finite(x, H) for x in tensors if x is not None]
        broken = found[0]
        for more in found[1:]:
            broken = broken | more
        if key_mask is not None:
            broken = broken & key_mask[:, None]
        T = broken.shape[2]
        start, end = document_bounds(cu_seqlens, T, T, broken.device)
        count = F.pad(broken.int().cumsum(2), (1, 0))
        before = count.index_select(2, start)
        self.positions, self.after = broken, count[:, :, 1:] > before
        self.documents = count.index_select(2, end) > before


def _not_finite(x: Tensor, H: int) -> Tensor:
    found = ~x.isfinite()
    found = found.any(-1) if x.ndim == 4 else found
    return found.unflatten(1, (H, -1)).any(2)


def zeros_at(x: MaybeTensor, where: Tensor) -> MaybeTensor:
    """x: [B, H·G, T] or [B, H·G, T, *] with zeros at `where`: [B, H, T]."""
    return x if x is None else x.masked_fill(_heads_of(x, where), 0)


def nan_at(x: MaybeTensor, where: Tensor) -> MaybeTensor:
    """As `zeros_at`, with NaN."""
    return x if x is None else x.masked_fill(_heads_of(x, where), math.nan)


def _heads_of(x: Tensor, where: Tensor) -> Tensor:
    where = where.repeat_interleave(x.shape[1] // where.shape[1], 1)
    return where[..., None] if x.ndim == 4 else where
