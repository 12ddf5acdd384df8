"""PaTH attention and LUCID's solve on PaTH scores for whole batches: sequence by sequence, some heads at a time.

A masked position is as if it were not there: the kept ones are gathered, computed and put back, and a masked one reads
zero. Memory is linear in the length; what the trees need beyond the inputs exists for the heads in flight only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import packing
from ..precision import no_autocast, working_dtype
from ..triangular import Schedule, pick_schedule
from . import readout, solve


class Sequences(NamedTuple):
    """Which positions belong together. key_mask: [B, S + T]; cu_seqlens: [n + 1]; T new and S past positions."""

    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    T: int
    S: int

    def parts(self) -> Iterator[tuple[packing.Part, packing.Part | None]]:
        """Each set of sequences that is computed together, with its past."""
        if self.S and self.key_mask is not None:
            yield from packing.kept_rows(self.key_mask, self.S)
        elif self.S:
            yield packing.LongDocument(0, self.T), packing.LongDocument(0, self.S)
        elif self.key_mask is not None:
            yield from ((part, None) for part in packing.kept_parts(self.key_mask, self.cu_seqlens))
        elif self.cu_seqlens is not None:
            yield from ((part, None) for part in packing.parts(self.cu_seqlens, self.T))
        else:
            yield packing.LongDocument(0, self.T), None

    def outputs(self, *like: Tensor | None) -> tuple[Tensor | None, ...]:
        """Buffers in the shapes of `like`: zero where not every position is computed."""
        make = torch.empty_like if self.key_mask is None else torch.zeros_like
        return tuple(None if x is None else make(x, memory_format=torch.contiguous_format) for x in like)


def _schedule(x: Tensor, S: int) -> Schedule:
    return pick_schedule(x.device, x.shape[0] * x.shape[1], x.shape[2], S)


def _flat(x: Tensor, group: tuple[slice, slice], dtype: torch.dtype) -> Tensor:
    return x[group].flatten(0, 1).to(dtype)


def _own(x: Tensor, group: tuple[slice, slice], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`_flat` to be overwritten: in `out`, where the result goes, if that has the dtype for it."""
    values = x[group].flatten(0, 1)
    fits = out is not None and out.dtype == dtype and out.is_contiguous()
    own = out[group].view(values.shape) if fits and out is not None else values.new_empty(values.shape, dtype=dtype)
    return own.copy_(values)


def _put(out: Tensor, group: tuple[slice, slice], value: Tensor) -> None:
    target = out[group]
    if target.data_ptr() != value.data_ptr():
        target.copy_(value.view(target.shape))


class AttentionInputs(NamedTuple):
    """q: [B, H·G, T, D]; k, w: [B, H, T, D]; y: [B, H, T, E]; beta: [B, H, T]; k_past, y_past: [B, H, S, *]."""

    q: Tensor
    k: Tensor
    y: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None
    y_past: Tensor | None

    def part(self, part: packing.Part, past: packing.Part | None) -> "AttentionInputs":
        old = (None, None) if past is None else (past.take(x) for x in self[5:] if x is not None)
        return AttentionInputs(*(part.take(x) for x in self[:5] if x is not None), *old)

    def heads(self, group: tuple[slice, slice], scale: float) -> readout.Heads:
        wide = working_dtype(self.k)
        q = self.q.unflatten(1, (self.k.shape[1], -1))
        k, y, w, k_past, y_past = (
            None if x is None else _flat(x, group, wide) for x in (self.k, self.y, self.w, self.k_past, self.y_past)
        )
        assert k is not None
        assert y is not None
        assert w is not None
        return readout.Heads(
            _flat(q, group, wide) * scale, k, y, w, _flat(self.beta, group, wide)[..., None], k_past, y_past
        )


def attend(inputs: AttentionInputs, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
    """o: [B, H·G, T, E] in the dtype of q and the log-sum-exps: [B, H·G, T]."""
    q, H = inputs.q, inputs.k.shape[1]
    o, lse = sequences.outputs(
        q.new_empty(*q.shape[:3], inputs.y.shape[3]), q.new_empty(q.shape[:3], dtype=working_dtype(q))
    )
    assert o is not None
    assert lse is not None
    with no_autocast(q):
        for part, past in sequences.parts():
            piece = inputs.part(part, past)
            part_o, part_lse = part.scratch(o), part.scratch(lse)
            for group in _schedule(piece.k, sequences.S).groups(*piece.k.shape[:2]):
                made = readout.attend(piece.heads(group, scale))
                for whole, heads in zip((part_o, part_lse), made, strict=True):
                    _put(whole.unflatten(1, (H, -1)), group, heads)
            part.put_(o, part_o)
            part.put_(lse, part_lse)
    return o, lse


def attend_backward(
    inputs: AttentionInputs, sequences: Sequences, scale: float, do: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients in the order and the shapes of `AttentionInputs`."""
    H, wide = inputs.k.shape[1], working_dtype(inputs.k)
    grads = sequences.outputs(*inputs)
    with no_autocast(do):
        for part, past in sequences.parts():
            piece = inputs.part(part, past)
            rows = [part.take_grad(do), part.take(o), part.take(lse)]
            owners = [part] * 5 + [past] * 2
            pieces = [
                None if grad is None or owner is None else owner.scratch(grad)
                for owner, grad in zip(owners, grads, strict=True)
            ]
            for group in _schedule(piece.k, sequences.S).groups(*piece.k.shape[:2]):
                row_heads = (_flat(x.unflatten(1, (H, -1)), group, wide) for x in rows)
                made = readout.attend_backward(piece.heads(group, scale), *row_heads)
                values = (made.q.mul_(scale), made.k, made.y, made.w, made.beta, made.k_past, made.y_past)
                for i, (whole, value) in enumerate(zip(pieces, values, strict=True)):
                    if whole is not None and value is not None:
                        _put(whole.unflatten(1, (H, -1)) if i == 0 else whole, group, value)
            _put_back(grads, pieces, owners)
    return grads


def _put_back(grads: tuple[Tensor | None, ...], pieces: list[Tensor | None], owners: list[packing.Part | None]) -> None:
    for grad, piece, owner in zip(grads, pieces, owners, strict=True):
        if grad is not None and piece is not None and owner is not None:
            owner.put_(grad, piece)


class SolveInputs(NamedTuple):
    """u, w: [B, H, T, D]; v: [B, H, T, E]; beta: [B, H, T]; u_past, y_past: [B, H, S, *]; shift: [B, H] or a number."""

    u: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    u_past: Tensor | None
    y_past: Tensor | None
    shift: Tensor | float

    def part(self, part: packing.Part, past: packing.Part | None) -> "SolveInputs":
        u, v, w, beta = (part.take(x) for x in (self.u, self.v, self.w, self.beta))
        u_past, y_past = (None if x is None or past is None else past.take(x) for x in (self.u_past, self.y_past))
        shift = self.shift
        if isinstance(shift, Tensor):
            shift = part.take(shift[:, :, None].expand(-1, -1, self.u.shape[2]))[:, :, 0]
        return SolveInputs(u, v, w, beta, u_past, y_past, shift)

    def heads(self, group: tuple[slice, slice]) -> solve.Heads:
        wide = working_dtype(self.u)
        u_past, y_past = (None if x is None else _flat(x, group, wide) for x in (self.u_past, self.y_past))
        shift = _flat(self.shift, group, wide)[:, None, None] if isinstance(self.shift, Tensor) else self.shift
        u, w, beta = (_flat(x, group, wide) for x in (self.u, self.w, self.beta))
        return solve.Heads(u, w, beta[..., None], u_past, y_past, shift)


def precondition(inputs: SolveInputs, sequences: Sequences) -> Tensor:
    """y: [B, H, T, E] in the dtype of v."""
    (y,) = sequences.outputs(inputs.v)
    assert y is not None
    wide = working_dtype(inputs.u)
    with no_autocast(y):
        for part, past in sequences.parts():
            piece, part_y = inputs.part(part, past), part.scratch(y)
            schedule = _schedule(piece.u, sequences.S)
            for group in schedule.groups(*piece.u.shape[:2]):
                values = _own(piece.v, group, wide, part_y)
                solve.solve(piece.heads(group), values, schedule)
                _put(part_y, group, values)
            part.put_(y, part_y)
    return y


def precondition_backward(
    inputs: SolveInputs, sequences: Sequences, dy: Tensor, y: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients in the order and the shapes of `SolveInputs`; None for a shift that is a number."""
    learned, wide = isinstance(inputs.shift, Tensor), working_dtype(inputs.u)
    grads = sequences.outputs(*inputs[:6])
    dshift = torch.zeros_like(inputs.shift) if isinstance(inputs.shift, Tensor) else None
    with no_autocast(dy):
        for part, past in sequences.parts():
            piece = inputs.part(part, past)
            part_dy, part_y = part.take_grad(dy), part.take(y)
            owners = [part] * 4 + [past] * 2
            pieces = [
                None if grad is None or owner is None else owner.scratch(grad)
                for owner, grad in zip(owners, grads, strict=True)
            ]
            piece_dshift = part_y.new_empty(part_y.shape[:2], dtype=wide)
            schedule = _schedule(piece.u, sequences.S)
            for group in schedule.groups(*piece.u.shape[:2]):
                heads, g = piece.heads(group), _own(part_dy, group, wide, pieces[1])
                dy_past = None if heads.y_past is None else torch.zeros_like(heads.y_past)
                args = heads, g, _flat(part_y, group, wide), schedule, dy_past
                made = solve.solve_backward(*args, shift_grad=learned)
                values = (made.u, g, made.w, made.beta, made.u_past, dy_past)
                for whole, value in zip(pieces, values, strict=True):
                    if whole is not None and value is not None:
                        _put(whole, group, value)
                if made.shift is not None:
                    _put(piece_dshift, group, made.shift)
            _put_back(grads, pieces, owners)
            if dshift is not None:
                _add_back(dshift, part, piece_dshift)
    return (*grads, dshift)


def _add_back(dshift: Tensor, part: packing.Part, piece: Tensor) -> None:
    """Add what every sequence of a part says of its row: [sequences, H] into [B, H]."""
    if isinstance(part, packing.KeptPositions):
        dshift.index_add_(0, part.rows[:, 0], piece.to(dshift.dtype))
    else:
        dshift += piece.to(dshift.dtype).unflatten(0, (dshift.shape[0], -1)).sum(1)
