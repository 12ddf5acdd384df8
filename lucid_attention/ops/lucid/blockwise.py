"""Block-wise Y = (I + s · diag(β) L)⁻¹ diag(β) V and its gradients: O(T·D) memory, never a T × T matrix.

Algorithms 2 to 4 of the paper with its errors corrected (`docs/paper_notes.md`). A masked key has β = 0, and its key
and value are replaced by zero: it leaves the system, NaN or not.

L_ij = exp(u_i·u_j − shift_i) is made of features u of the keys:

norm="key", "qk":  u = √c · k/‖k‖,   shift = c, so that L_ij = exp(c (cos θ_ij − 1))
norm="row_max":    u = √(c/D) · k,   shift_i = max_{j ≤ i} u_i·u_j
"""

import math

import torch
from torch import Tensor

from ..blocks import DiagonalBlocks, borders, is_causal
from ..keys import inverse_norms
from ..precision import no_autocast
from ..triangular import FOLDED_SHIFT, ExponentialTiles, Schedule, pick_schedule, solve_, solve_adjoint_, spans
from .system import Gradients, System

Group = tuple[slice, slice]


class KeyFeatures:
    """u of n heads, and the way back from du to the keys.

    k: [n, S + T, D], overwritten by u; a masked key must be zero. sharpness: that of the n heads, a number or
    [n, 1, 1].
    """

    def __init__(self, k: Tensor, system: System, sharpness: float | Tensor) -> None:
        self.sharpness, self.strength, self.row_max = sharpness, system.strength, system.row_max
        root = math.sqrt(sharpness) if isinstance(sharpness, float) else sharpness.sqrt()
        if self.row_max:
            self.slope = k.new_full((1, 1, 1), k.shape[-1] ** -0.5) * root
        else:
            # Few heads at a time on a CPU: their float64 copy stays in its cache.
            at_once = max(1, 2**18 // max(1, k.shape[1] * k.shape[2])) if k.device.type == "cpu" else len(k)
            self.slope = torch.cat([inverse_norms(heads) for heads in k.split(at_once)]) * root
        self.u = k.mul_(self.slope)

    def tiles(self, elements: int, winners: Tensor | None) -> ExponentialTiles:
        """winners: [n, S + T], the column of each row's maximum; None unless norm is "row_max"."""
        if winners is not None:
            return ExponentialTiles(self.u, self.strength, self._row_maxima(winners), elements)
        if isinstance(self.sharpness, Tensor):
            return ExponentialTiles(self.u, self.strength, self.sharpness, elements)
        if self.sharpness > FOLDED_SHIFT:
            return ExponentialTiles(self.u, self.strength, self.u.new_full((1, 1, 1), self.sharpness), elements)
        return ExponentialTiles(self.u, self.strength * math.exp(-self.sharpness), None, elements)

    def _winning(self, winners: Tensor) -> Tensor:
        return self.u.gather(1, winners[:, :, None].expand_as(self.u))

    def _row_maxima(self, winners: Tensor) -> Tensor:
        return (self.u * self._winning(winners)).sum(-1, keepdim=True)

    def pull_back(self, tiles: ExponentialTiles, winners: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return dk: [n, S + T, D] and dc: [n] (None if `tiles` did not keep row sums)."""
        u, du = self.u, tiles.du
        if winners is not None and tiles.row_sums is not None:
            # The exponent has −shift_i = −u_i·u_winner: subtract the gradient through it.
            index = winners[:, :, None].expand_as(u)
            du.sub_(tiles.row_sums * self._winning(winners)).scatter_add_(1, index, -tiles.row_sums * u)
        along = (u * du).sum(-1, keepdim=True)
        dc = None
        if tiles.row_sums is not None:
            c = self.sharpness if isinstance(self.sharpness, float) else self.sharpness[:, 0]
            dc = (along.sum(1) / (2 * c) - (0.0 if self.row_max else tiles.row_sums.sum(1)))[:, 0]
        if not self.row_max:
            # u has a fixed length √c: only the part of du across u reaches the key.
            du.sub_(u * along.div_(self.sharpness))
        return du.mul_(self.slope), dc


def row_winners(u: Tensor, past: int, key_mask: Tensor | None, schedule: Schedule) -> Tensor:
    """argmax_{j ≤ i} u_i·u_j over unmasked j (and i itself), for the rows after `past`: [n, S + T].

    Rows of the past hold their own index and are not used. u: [n, S + T, D]; key_mask: [n, S + T].
    """
    n, total, _ = u.shape
    index = torch.arange(total, device=u.device)
    best = (u * u).sum(-1)
    winners = index.expand(n, total).clone()
    for rows in spans(past, total, schedule.block):
        for cols in spans(0, rows.stop, max(1, schedule.elements // (rows.stop - rows.start))):
            scores = torch.bmm(u[:, rows], u[:, cols].mT)
            scores.masked_fill_(index[cols] >= index[rows, None], -math.inf)
            if key_mask is not None:
                scores.masked_fill_(~key_mask[:, None, cols], -math.inf)
            value, where = scores.max(-1)
            better = value > best[:, rows]
            best[:, rows] = torch.where(better, value, best[:, rows])
            winners[:, rows] = torch.where(better, where + cols.start, winners[:, rows])
    return winners


def _flat(x: Tensor | None, group: Group) -> Tensor | None:
    return None if x is None else x[group].flatten(0, 1)


class SystemHeads:
    """The heads of one group of a system, flattened to n, in working precision."""

    def __init__(self, system: System, group: Group) -> None:
        n_batch, n_heads = system.k[group].shape[:2]
        D, S, total = system.k.shape[3], system.past_length, system.past_length + system.k.shape[2]
        k = system.k.new_empty(n_batch * n_heads, total, D, dtype=system.dtype)
        views = k.view(n_batch, n_heads, total, D)
        views[:, :, S:] = system.k[group]
        if system.k_past is not None:
            views[:, :, :S] = system.k_past[group]
        self.key_mask = None
        if system.key_mask is not None:
            self.key_mask = system.key_mask[group[0], None].expand(n_batch, n_heads, total).flatten(0, 1)
            k.masked_fill_(~self.key_mask[:, :, None], 0)
        sharpness = system.sharpness
        if isinstance(sharpness, Tensor):
            sharpness = sharpness[group].reshape(-1, 1, 1).to(system.dtype)
        self.features = KeyFeatures(k, system, sharpness)
        self.y_past = self._past_values(system, group)
        self.beta = self._weights(system, group)

    def _past_values(self, system: System, group: Group) -> Tensor | None:
        y_past = _flat(system.y_past, group)
        if y_past is None:
            return None
        y_past = y_past.to(system.dtype)
        if self.key_mask is None:
            return y_past
        return y_past.masked_fill(~self.key_mask[:, : system.past_length, None], 0)

    def _weights(self, system: System, group: Group) -> Tensor | None:
        beta = _flat(system.beta, group)
        if beta is not None:
            beta = beta.to(system.dtype)[:, :, None]
        if self.key_mask is None:
            return beta
        taking_part = self.key_mask[:, system.past_length :, None]
        return taking_part.to(system.dtype) if beta is None else beta.masked_fill(~taking_part, 0)

    def values(self, v: Tensor, group: Group, out: Tensor | None) -> Tensor:
        """v of the group in working precision, masked positions zero; in `out` if that has the working dtype."""
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


def _schedule(system: System) -> Schedule:
    B, H, T, _ = system.k.shape
    return pick_schedule(system.k.device, B * H, T, system.past_length, by_heads=True)


def _diagonal_blocks(system: System, schedule: Schedule) -> tuple[DiagonalBlocks | None, Schedule]:
    """The diagonal steps of blocks of tokens that see each other, None for a causal system; and their schedule."""
    if is_causal(system.block):
        return None, schedule
    cuts = borders(system.block, system.k.shape[2])
    blocks = DiagonalBlocks.scheduled(cuts, schedule, system.k, system.tolerance)
    return blocks, blocks.schedule


def _store(out: Tensor, group: Group, value: Tensor) -> None:
    target = out[group]
    if target.data_ptr() != value.data_ptr():
        target.copy_(value.view(target.shape))


def forward(
    system: System, v: Tensor, y: Tensor, z: Tensor | None, winners: Tensor | None, schedule: Schedule | None = None
) -> None:
    """Write y [B, H, T, E], and z [B, H, T, E] and winners [B, H, S + T] if they are not None."""
    if system.strength == 0:
        _forward_of_identity(system, v, y, z, winners)
        return
    blocks, schedule = _diagonal_blocks(system, schedule or _schedule(system))

    def solve(group: Group) -> None:
        heads = SystemHeads(system, group)
        won = None
        if winners is not None:
            won = row_winners(heads.features.u, system.past_length, heads.key_mask, schedule)
            _store(winners, group, won)
        wide = heads.values(v, group, y)
        wide_z = None if z is None else torch.empty_like(wide)
        tiles = heads.features.tiles(schedule.elements, won)
        solve_(wide, tiles, schedule, heads.beta, wide_z, heads.y_past, blocks)
        _store(y, group, wide)
        if z is not None and wide_z is not None:
            _store(z, group, wide_z)

    with no_autocast(v):
        schedule.run(solve, system.k)


def backward(
    system: System,
    dy: Tensor,
    y: Tensor,
    z: Tensor | None,
    winners: Tensor | None,
    out: Gradients,
    schedule: Schedule | None = None,
) -> None:
    """Write all gradients that have a buffer in `out`."""
    if system.strength == 0:
        _backward_of_identity(system, dy, z, out)
        return
    blocks, schedule = _diagonal_blocks(system, schedule or _schedule(system))
    S = system.past_length

    def solve(group: Group) -> None:
        heads = SystemHeads(system, group)
        won = _flat(winners, group)
        tiles = heads.features.tiles(schedule.elements, won)
        if out.dk is not None:
            tiles.collect_gradients(row_sums=out.dsharpness is not None or system.row_max)
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
            diagonal_blocks=blocks,
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

    with no_autocast(dy):
        schedule.run(solve, system.k)


def _forward_of_identity(system: System, v: Tensor, y: Tensor, z: Tensor | None, winners: Tensor | None) -> None:
    """`forward` at strength 0: the matrix is the identity."""
    v = system.zero_masked(v.to(system.dtype))
    y.copy_(v if system.beta is None else system.zero_masked(system.beta.to(system.dtype))[..., None] * v)
    if z is not None:
        z.copy_(v)
    if winners is not None:
        winners.zero_()


def _backward_of_identity(system: System, dy: Tensor, z: Tensor | None, out: Gradients) -> None:
    g = system.zero_masked(dy.to(system.dtype))
    out.dv.copy_(g if system.beta is None else system.zero_masked(system.beta.to(system.dtype))[..., None] * g)
    if out.dbeta is not None and z is not None:
        out.dbeta.copy_((z.to(system.dtype) * g).sum(-1))
    for absent in (out.dk, out.dk_past, out.dy_past, out.dsharpness):
        if absent is not None:
            absent.zero_()
