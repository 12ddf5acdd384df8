"""LUCID's triangular system on PaTH scores: Y = P⁻¹ V with P_ij = exp(u_iᵀ H_i … H_{j+1} u_j − c), j < i.

The solver is that of `triangular.py` in the order of the tree: the tiles of a join are plain products of re-based rows
and keys, and both are the same features u = √c k/‖k‖.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..exponential import FOLDED_SHIFT, ExponentialTiles
from ..triangular import Schedule, solve_, solve_adjoint_
from .scores import Layout, PathScores
from .tree import Join

# Leaves of a diagonal block: as large as the blocks of plain LUCID.
BLOCK_LEAVES = 4
# Blocks whose scores are made, and taken back, in one go.
BLOCKS_AT_ONCE = 4


@dataclass(frozen=True)
class Heads:
    """u, w: [n, T, D]; beta: [n, T, 1]; u_past, y_past: [n, S, D], [n, S, E]; shift: c, a number or [n, 1, 1]."""

    u: Tensor
    w: Tensor
    beta: Tensor
    u_past: Tensor | None
    y_past: Tensor | None
    shift: float | Tensor


@dataclass(frozen=True)
class Gradients:
    """In the shapes of `Heads`; shift: [n]."""

    u: Tensor
    w: Tensor
    beta: Tensor
    u_past: Tensor | None
    shift: Tensor | None


def pick_layout(T: int) -> Layout:
    return Layout.of(T, BLOCK_LEAVES)


def path_schedule(picked: Schedule, layout: Layout) -> Schedule:
    """The schedule of plain LUCID, in the order of the tree and with its blocks."""
    block = layout.block
    return Schedule(picked.heads, block, max(picked.elements, block * block), tree=True)


class PathTiles(ExponentialTiles):
    """Tiles over S + T positions, where T counts what `layout` fills up at the end."""

    def __init__(self, heads: Heads, layout: Layout, schedule: Schedule, *, keep: bool = True) -> None:
        alpha, shift = 1.0, None
        if isinstance(heads.shift, Tensor):
            shift = heads.shift
        elif heads.shift > FOLDED_SHIFT:
            shift = heads.u.new_full((1, 1, 1), heads.shift)
        else:
            alpha = math.exp(-heads.shift)
        super().__init__(heads.u, alpha, shift, schedule.elements)
        u, w, beta = (layout.cut(x) for x in (heads.u, heads.w, heads.beta))
        self.scores = PathScores(layout, u, u, w, beta, to_the_root=heads.u_past is not None, keep=True)
        self.u_past, self.S = heads.u_past, 0 if heads.u_past is None else heads.u_past.shape[1]
        self._joins = {(join.size, join.first): join for join in self.scores.joins}
        self._ready, self._ready_scores = slice(0, 0), self.u

    def make(self, rows: slice, cols: slice) -> Tensor:
        if rows != cols:
            return super().make(rows, cols)
        block, size = (rows.start - self.S) // self.scores.layout.block, rows.stop - rows.start
        if not self._ready.start <= block < self._ready.stop:
            self._ready = self._together(block)
            self._ready_scores = self.scores.block_scores(self._ready.start, self._ready.stop)
        n = self.u.shape[0]
        tile = self._tile[: n * size * size].view(n, size, size)
        tile.copy_(self._ready_scores[:, block - self._ready.start, :size, :size])
        return self.exponentiate_(tile, rows)

    def _together(self, block: int) -> slice:
        """The blocks that are made in one go with this one."""
        first = block - block % BLOCKS_AT_ONCE
        return slice(first, min(first + BLOCKS_AT_ONCE, self.scores.layout.blocks))

    def operands(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        if self.u_past is not None and cols.stop <= self.S:
            return self._root()[:, self._new(rows)], self.u_past[:, cols]
        join, pair, rows, cols = self._find(rows, cols)
        return join.q[:, pair, rows], join.k[:, pair, cols]

    def operand_grads(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        if self.du_past is not None and cols.stop <= self.S:
            return self.droot.flatten(1, 2)[:, self._new(rows)], self.du_past[:, cols]
        join, pair, rows, cols = self._find(rows, cols)
        assert join.dq is not None
        assert join.dk is not None
        return join.dq[:, pair, rows], join.dk[:, pair, cols]

    def _root(self) -> Tensor:
        return self.scores.rows.flatten(1, 2)

    def _new(self, rows: slice) -> slice:
        return slice(rows.start - self.S, rows.stop - self.S)

    def _find(self, rows: slice, cols: slice) -> tuple[Join, int, slice, slice]:
        """The join and pair that hold a tile, with its place there."""
        rows, cols = self._new(rows), self._new(cols)
        layout = self.scores.layout
        right, left = rows.start // layout.block, cols.start // layout.block
        nodes = 1 << ((right ^ left).bit_length() - 1)
        pair, size = right // (2 * nodes), nodes * layout.L
        join = self._joins.get((size, 0))
        if join is None or pair >= join.pairs:
            join, pair = self._joins[size, 2 * pair * size], 0
        start = join.first * layout.C + 2 * pair * size * layout.C
        middle = start + size * layout.C
        return (
            join,
            pair,
            slice(rows.start - middle, rows.stop - middle),
            slice(cols.start - start, cols.stop - start),
        )

    def collect_gradients(self, row_sums: bool) -> None:
        self.row_sums = self.u.new_zeros(self.u.shape[0], self.S + self.u.shape[1], 1) if row_sums else None
        self._grad = torch.empty_like(self._tile)
        self._block_grads: Tensor | None = None
        self.scores.collect_gradients()
        for join in self.scores.joins:
            join.dq, join.dk = torch.zeros_like(join.q), torch.zeros_like(join.k)
        self.droot = torch.zeros_like(self.scores.rows)
        self.du_past = None if self.u_past is None else torch.zeros_like(self.u_past)

    def pull_back(self, rows: slice, cols: slice, tile: Tensor, left: Tensor, right: Tensor, diagonal: bool) -> None:
        if not diagonal:
            super().pull_back(rows, cols, tile, left, right, diagonal)
            return
        layout, size = self.scores.layout, rows.stop - rows.start
        block = (rows.start - self.S) // layout.block
        together = self._together(block)
        if self._block_grads is None:
            at_once = together.stop - together.start
            self._block_grads = self.u.new_zeros(tile.shape[0], at_once, layout.block, layout.block)
        here = self._block_grads[:, block - together.start, :size, :size]
        torch.mul(self.score_grads(rows, tile, left, right, True), -self.alpha, out=here)
        if block == together.start:
            # Blocks come from the last to the first: this was the last of them.
            self.scores.block_pull_back(together.start, together.stop, self._block_grads)
            self._block_grads = None

    def gradients(self) -> Gradients:
        """Of the heads, once every tile has been pulled back."""
        layout = self.scores.layout
        grads = self.scores.pull_back(self.droot if self.u_past is not None else None)
        dshift = None if self.row_sums is None else -self.row_sums.sum((1, 2))
        du = layout.join(grads.dq.add_(grads.dk))
        return Gradients(du, layout.join(grads.dw), layout.join(grads.dbeta), self.du_past, dshift)


def solve(heads: Heads, y: Tensor, schedule: Schedule) -> None:
    """Overwrite V with Y in place: y [n, T, E]."""
    layout = pick_layout(y.shape[1])
    schedule = path_schedule(schedule, layout)
    solve_(y, PathTiles(heads, layout, schedule), schedule, y_past=heads.y_past)


def solve_backward(
    heads: Heads, g: Tensor, y: Tensor, schedule: Schedule, dy_past: Tensor | None, *, shift_grad: bool
) -> Gradients:
    """Overwrite dY with dV in place: g, y [n, T, E]; dy_past: [n, S, E], zero on entry. Return the other gradients."""
    layout = pick_layout(y.shape[1])
    schedule = path_schedule(schedule, layout)
    tiles = PathTiles(heads, layout, schedule)
    tiles.collect_gradients(row_sums=shift_grad)
    solve_adjoint_(g, y, tiles, schedule, y_past=heads.y_past, dy_past=dy_past)
    return tiles.gradients()
