"""PaTH, LUCID's solve on PaTH scores, or both, for whole batches: sequence by sequence, some heads at a time.

A masked position is as if it were not there: the kept ones are gathered, computed and put back, and a masked one reads
zero. Memory is linear in the length; what the trees need beyond the inputs exists for the heads in flight only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import packing
from ..precision import no_autocast, working_dtype
from ..triangular import Schedule, pick_schedule
from . import passes

Group = tuple[slice, slice]

# Heads of short sequences run together, up to so many positions: many small steps would cost more than their work.
POSITIONS = 2048


class Inputs(NamedTuple):
    """The tensors of a problem, None where there is none; gradients come in the same places.

    q: [B, H·G, T, D]; k, w: [B, H, T, D]; v: [B, H, T, E]; beta: [B, H, T]; of a past k_past: [B, H, S, D], y_past:
    [B, H, S, E], scalars_past: [B, H, S]; sharpness: [B, H].
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None
    y_past: Tensor | None
    scalars_past: Tensor | None
    sharpness: Tensor | None


class Problem(NamedTuple):
    """What is asked: of which positions, with which numbers.

    key_mask: [B, S + T]; cu_seqlens: [n + 1]; scale: of the scores; sharpness: c where `Inputs` has none;
    solves: whether values are preconditioned.
    """

    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    sharpness: float
    solves: bool

    def parts(self, T: int, S: int) -> Iterator[tuple[packing.Part, packing.Part | None]]:
        """Each set of sequences that is computed together, with its past."""
        if S and self.key_mask is not None:
            yield from packing.kept_rows(self.key_mask, S)
        elif S:
            yield packing.LongDocument(0, T), packing.LongDocument(0, S)
        elif self.key_mask is not None:
            yield from ((part, None) for part in packing.kept_parts(self.key_mask, self.cu_seqlens))
        elif self.cu_seqlens is not None:
            yield from ((part, None) for part in packing.parts(self.cu_seqlens, T))
        else:
            yield packing.LongDocument(0, T), None

    def output(self, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor to be written: zero where not every position is computed."""
        make = like.new_empty if self.key_mask is None else like.new_zeros
        return make(shape, dtype=dtype or like.dtype)


class _Piece:
    """Some sequences of a problem: [sequences, H, L, *]."""

    def __init__(self, problem: Problem, inputs: Inputs, part: packing.Part, past: packing.Part | None) -> None:
        self.problem, self.part, self.past = problem, part, past
        self.H, self._T = inputs.k.shape[1:3]
        taken = [self._take(name, x) for name, x in zip(Inputs._fields, inputs, strict=True)]
        self.inputs = Inputs(*taken)  # type: ignore[arg-type]
        k = self.inputs.k
        S = 0 if self.inputs.k_past is None else self.inputs.k_past.shape[2]
        self.schedule = _schedule(k, S)
        self.wide = working_dtype(k)

    def _take(self, name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if name == "sharpness":
            # One for each sequence: as if every position had its own.
            return self.part.take(x[:, :, None].expand(-1, -1, self._T))[:, :, 0]
        owner = self.owner(name)
        if owner is None:
            return None
        # What fills up a shorter sequence repeats its last position. Without a factor of its own it stays as harmless:
        # factors of any size would make scores of any size.
        return owner.take_grad(x) if name == "beta" else owner.take(x)

    def owner(self, name: str) -> packing.Part | None:
        return self.past if name.endswith("_past") else self.part

    def scratch(self, name: str, whole: Tensor | None) -> Tensor | None:
        """To be written for these sequences, where the input of that name exists for them."""
        owner, x = self.owner(name), getattr(self.inputs, name)
        if whole is None or owner is None or x is None:
            return None
        return torch.empty_like(x) if name == "sharpness" else owner.scratch(whole)

    def groups(self) -> Iterator[Group]:
        return self.schedule.groups(*self.inputs.k.shape[:2])

    def flat(self, x: Tensor, group: Group) -> Tensor:
        """[sequences, H, *] -> [n, *] in working precision."""
        return x[group].flatten(0, 1).to(self.wide)

    def by_kv_head(self, x: Tensor) -> Tensor:
        """[sequences, H·G, *] -> [sequences, H, G, *]."""
        return x.unflatten(1, (self.H, -1))

    def heads(self, group: Group, *, reads: bool) -> passes.Heads:
        q, k, v, w, beta, k_past, y_past, scalars_past, sharpness = self.inputs
        rows = None
        if q is not None and reads:
            rows = self.flat(self.by_kv_head(q), group) * self.problem.scale
        c: float | Tensor | None = None
        if self.problem.solves:
            c = self.problem.sharpness if sharpness is None else self.flat(sharpness, group)[:, None, None]
        old = [None if x is None else self.flat(x, group) for x in (k_past, y_past, scalars_past)]
        k, v, w, beta = (self.flat(x, group) for x in (k, v, w, beta))
        scalars = None if old[2] is None else old[2][..., None]
        return passes.Heads(rows, k, v, w, beta[..., None], old[0], old[1], scalars, c)


def _schedule(k: Tensor, S: int) -> Schedule:
    heads, T = k.shape[0] * k.shape[1], k.shape[2]
    picked = pick_schedule(k.device, heads, T, S)
    return replace(picked, heads=max(picked.heads, min(heads, POSITIONS // T)))


def _pieces(problem: Problem, inputs: Inputs) -> Iterator[_Piece]:
    S = 0 if inputs.k_past is None else inputs.k_past.shape[2]
    for part, past in problem.parts(inputs.k.shape[2], S):
        yield _Piece(problem, inputs, part, past)


def _put(out: Tensor, group: Group, value: Tensor) -> None:
    target = out[group]
    target.copy_(value.view(target.shape))


def forward(inputs: Inputs, problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """o: [B, H·G, T, E] in the dtype of q and lse: [B, H·G, T], if there is a q; y: [B, H, T, E], if it solves."""
    q, v = inputs.q, inputs.v
    o = lse = None
    if q is not None:
        o = problem.output(*q.shape[:3], v.shape[3], like=q)
        lse = problem.output(*q.shape[:3], like=q, dtype=working_dtype(q))
    y = problem.output(*v.shape, like=v) if problem.solves else None
    outputs = [x for x in (o, lse, y) if x is not None]
    with no_autocast(v):
        for piece in _pieces(problem, inputs):
            scratch = [piece.part.scratch(x) for x in outputs]
            for group in piece.groups():
                made = passes.forward(piece.heads(group, reads=True), piece.schedule)
                for whole, value in zip(scratch, (x for x in made if x is not None), strict=True):
                    _put(piece.by_kv_head(whole), group, value)
            for whole, part_of_it in zip(outputs, scratch, strict=True):
                piece.part.put_(whole, part_of_it)
    return o, lse, y


def backward(
    inputs: Inputs, problem: Problem, made: Sequence[Tensor | None], do: Tensor | None, dy: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients in the order and the shapes of `Inputs`. made: what `forward` gave; do, dy: gradients of o and y."""
    grads = [None if x is None else problem.output(*x.shape, like=x) for x in inputs]
    if inputs.q is not None and do is None:
        grads[0] = torch.zeros_like(inputs.q)
    if inputs.sharpness is not None:
        grads[-1] = torch.zeros_like(inputs.sharpness)
    with no_autocast(inputs.v):
        for piece in _pieces(problem, inputs):
            _backward_of(piece, grads, made, do, dy)
    return tuple(grads)


def _backward_of(
    piece: _Piece, grads: list[Tensor | None], made: Sequence[Tensor | None], do: Tensor | None, dy: Tensor | None
) -> None:
    part, names = piece.part, Inputs._fields
    saved = [None if x is None else part.take(x) for x in made]
    do, dy = (None if x is None else part.take_grad(x) for x in (do, dy))
    scratch = [piece.scratch(name, grad) for name, grad in zip(names, grads, strict=True)]
    if do is None:
        scratch[0] = None  # nothing reaches q
    for group in piece.groups():
        o, lse, y = (None if x is None else piece.flat(piece.by_kv_head(x), group) for x in saved)
        outputs = passes.Outputs(o, lse, None if y is None else y[:, 0])
        row_grads = None if do is None else piece.flat(piece.by_kv_head(do), group)
        value_grads = None if dy is None else piece.flat(dy, group)
        found = passes.backward(
            piece.heads(group, reads=do is not None), piece.schedule, outputs, row_grads, value_grads
        )
        if found.q is not None:
            found.q.mul_(piece.problem.scale)
        for name, whole in zip(names, scratch, strict=True):
            value = getattr(found, name)
            if whole is not None:
                _put(piece.by_kv_head(whole) if name == "q" else whole, group, value)
    for name, grad, part_of_it in zip(names, grads, scratch, strict=True):
        owner = piece.owner(name)
        if grad is not None and part_of_it is not None and owner is not None:
            if name == "sharpness":
                _add_back(grad, part, part_of_it)
            else:
                owner.put_(grad, part_of_it)


def _add_back(grad: Tensor, part: packing.Part, piece: Tensor) -> None:
    """Add what every sequence of a part says of its row: [sequences, H] into [B, H]."""
    if isinstance(part, packing.KeptPositions):
        grad.index_add_(0, part.rows[:, 0], piece)
    else:
        grad += piece.unflatten(0, (grad.shape[0], -1)).sum(1)
