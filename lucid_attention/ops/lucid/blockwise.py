"""Block-wise Y = (I + diag(β) L)⁻¹ diag(β) V and its gradients: O(T·D) memory, never a T × T matrix.

Algorithms 2 to 4 of the paper with its errors corrected (`docs/paper_notes.md`). Masking is one rule: a masked key has
β = 0 and its key and value read as zero, which takes it out of the system whatever stands there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import packing
from ..precision import no_autocast, working_dtype
from ..triangular import Schedule, pick_schedule, solve_, solve_adjoint_
from .features import KeyFeatures, row_winners


@dataclass(frozen=True)
class Problem:
    """What is asked, as tensors [B, H, T, *].

    k: [B, H, T, D]; k_past, y_past: [B, H, S, D], [B, H, S, E]; beta: [B, H, T]; sharpness: a number or [B, H];
    key_mask: [B, S + T]; row_max: raw keys with the causal row maximum subtracted; strength: the factor s of L.
    """

    k: Tensor
    k_past: Tensor | None
    y_past: Tensor | None
    beta: Tensor | None
    sharpness: float | Tensor
    key_mask: Tensor | None
    row_max: bool
    strength: float

    @property
    def past(self) -> int:
        return 0 if self.k_past is None else self.k_past.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.k)

    def part(self, part: packing.Part) -> "Problem":
        """The problem of some documents of a packed row."""
        beta = None if self.beta is None else part.take(self.beta)
        key_mask = None if self.key_mask is None else part.take(self.key_mask)
        k, sharpness = part.take(self.k), self.sharpness
        if isinstance(sharpness, Tensor):
            sharpness = sharpness.repeat_interleave(k.shape[0] // sharpness.shape[0], 0)
        return Problem(k, None, None, beta, sharpness, key_mask, self.row_max, self.strength)


def _flat(x: Tensor | None, group: tuple[slice, slice]) -> Tensor | None:
    return None if x is None else x[group].flatten(0, 1)


class Heads:
    """The heads of one group of a problem, flattened to n, in working precision."""

    def __init__(self, problem: Problem, group: tuple[slice, slice]) -> None:
        n_batch, n_heads = problem.k[group].shape[:2]
        D, S, total = problem.k.shape[3], problem.past, problem.past + problem.k.shape[2]
        k = problem.k.new_empty(n_batch * n_heads, total, D, dtype=problem.dtype)
        views = k.view(n_batch, n_heads, total, D)
        views[:, :, S:] = problem.k[group]
        if problem.k_past is not None:
            views[:, :, :S] = problem.k_past[group]
        self.key_mask = None
        if problem.key_mask is not None:
            self.key_mask = problem.key_mask[group[0], None].expand(n_batch, n_heads, total).flatten(0, 1)
            k.masked_fill_(~self.key_mask[:, :, None], 0)
        sharpness = problem.sharpness
        if isinstance(sharpness, Tensor):
            sharpness = sharpness[group].reshape(-1, 1, 1).to(problem.dtype)
        self.features = KeyFeatures(k, sharpness, problem.strength, problem.row_max)
        self.y_past = self._past_values(problem, group)
        self.beta = self._weights(problem, group)

    def _past_values(self, problem: Problem, group: tuple[slice, slice]) -> Tensor | None:
        y_past = _flat(problem.y_past, group)
        if y_past is None:
            return None
        y_past = y_past.to(problem.dtype)
        if self.key_mask is None:
            return y_past
        return y_past.masked_fill(~self.key_mask[:, : problem.past, None], 0)

    def _weights(self, problem: Problem, group: tuple[slice, slice]) -> Tensor | None:
        beta = _flat(problem.beta, group)
        if beta is not None:
            beta = beta.to(problem.dtype)[:, :, None]
        if self.key_mask is None:
            return beta
        taking_part = self.key_mask[:, problem.past :, None]
        return taking_part.to(problem.dtype) if beta is None else beta.masked_fill(~taking_part, 0)

    def values(self, v: Tensor, group: tuple[slice, slice], out: Tensor | None) -> Tensor:
        """v of the group in working precision, masked positions zero; in `out` where that has the dtype for it."""
        source = v[group]
        dtype = self.features.u.dtype
        shape = (source.shape[0] * source.shape[1], *source.shape[2:])
        if out is not None and out.dtype == dtype:
            wide = out[group].view(shape)
        else:
            wide = source.new_empty(shape, dtype=dtype)
        wide.view(source.shape).copy_(source)
        if self.key_mask is not None:
            wide.masked_fill_(~self.key_mask[:, -wide.shape[1] :, None], 0)
        return wide


def _schedule(problem: Problem) -> Schedule:
    B, H, T, _ = problem.k.shape
    return pick_schedule(problem.k.device, B * H, T, problem.past)


def _store(out: Tensor, group: tuple[slice, slice], value: Tensor) -> None:
    target = out[group]
    if target.data_ptr() != value.data_ptr():
        target.copy_(value.view(target.shape))


def forward(
    problem: Problem, v: Tensor, y: Tensor, z: Tensor | None, winners: Tensor | None, schedule: Schedule | None = None
) -> None:
    """Write y [B, H, T, E], and z [B, H, T, E] and winners [B, H, S + T] where they are asked for."""
    if problem.strength == 0:
        _forward_of_identity(problem, v, y, z, winners)
        return
    schedule = schedule or _schedule(problem)
    with no_autocast(v):
        for group in schedule.groups(*problem.k.shape[:2]):
            heads = Heads(problem, group)
            won = None
            if winners is not None:
                won = row_winners(heads.features.u, problem.past, heads.key_mask, schedule)
                _store(winners, group, won)
            wide = heads.values(v, group, y)
            wide_z = None if z is None else torch.empty_like(wide)
            tiles = heads.features.tiles(schedule.elements, won)
            solve_(wide, tiles, schedule, heads.beta, wide_z, heads.y_past)
            _store(y, group, wide)
            if z is not None and wide_z is not None:
                _store(z, group, wide_z)


@dataclass(frozen=True)
class Gradients:
    """Buffers for the gradients, shaped as what they belong to; None where a gradient is not asked for."""

    dv: Tensor
    dk: Tensor | None
    dk_past: Tensor | None
    dy_past: Tensor | None
    dbeta: Tensor | None
    dsharpness: Tensor | None


def backward(
    problem: Problem,
    dy: Tensor,
    y: Tensor,
    z: Tensor | None,
    winners: Tensor | None,
    out: Gradients,
    schedule: Schedule | None = None,
) -> None:
    """Write all gradients that have a buffer in `out`."""
    if problem.strength == 0:
        _backward_of_identity(problem, dy, z, out)
        return
    schedule = schedule or _schedule(problem)
    S = problem.past
    with no_autocast(dy):
        for group in schedule.groups(*problem.k.shape[:2]):
            heads = Heads(problem, group)
            won = _flat(winners, group)
            tiles = heads.features.tiles(schedule.elements, won)
            if out.dk is not None:
                tiles.collect_gradients(row_sums=out.dsharpness is not None or problem.row_max)
            g = heads.values(dy, group, out.dv)
            dy_past = None if heads.y_past is None else torch.zeros_like(heads.y_past)
            dbeta = None if out.dbeta is None else torch.empty_like(g[:, :, :1])
            solve_adjoint_(
                g,
                heads.values(y, group, None),
                tiles,
                schedule,
                tile_grads=out.dk is not None,
                beta=heads.beta,
                z=None if z is None else heads.values(z, group, None),
                dbeta=dbeta,
                y_past=heads.y_past,
                dy_past=dy_past,
            )
            _store(out.dv, group, g)
            if out.dbeta is not None and dbeta is not None:
                _store(out.dbeta, group, dbeta)
            if out.dy_past is not None and dy_past is not None:
                if heads.key_mask is not None:
                    dy_past.masked_fill_(~heads.key_mask[:, :S, None], 0)
                _store(out.dy_past, group, dy_past)
            if out.dk is not None:
                dk, dc = heads.features.pull_back(tiles, won)
                _store(out.dk, group, dk[:, S:])
                if out.dk_past is not None:
                    _store(out.dk_past, group, dk[:, :S])
                if out.dsharpness is not None and dc is not None:
                    _store(out.dsharpness, group, dc)


def _taking_part(problem: Problem, x: Tensor) -> Tensor:
    """x: [B, H, T, *] in working precision, zero at masked keys."""
    x = x.to(problem.dtype)
    if problem.key_mask is None:
        return x
    hidden = ~problem.key_mask[:, None, problem.past :]
    return x.masked_fill(hidden if x.ndim == 3 else hidden[..., None], 0)


def _forward_of_identity(problem: Problem, v: Tensor, y: Tensor, z: Tensor | None, winners: Tensor | None) -> None:
    """`forward` at strength 0: L = 0, and nothing is to be solved."""
    v = _taking_part(problem, v)
    y.copy_(v if problem.beta is None else _taking_part(problem, problem.beta)[..., None] * v)
    if z is not None:
        z.copy_(v)
    if winners is not None:
        winners.zero_()


def _backward_of_identity(problem: Problem, dy: Tensor, z: Tensor | None, out: Gradients) -> None:
    g = _taking_part(problem, dy)
    out.dv.copy_(g if problem.beta is None else _taking_part(problem, problem.beta)[..., None] * g)
    if out.dbeta is not None and z is not None:
        out.dbeta.copy_((z.to(problem.dtype) * g).sum(-1))
    for nothing in (out.dk, out.dk_past, out.dy_past, out.dsharpness):
        if nothing is not None:
            nothing.zero_()
