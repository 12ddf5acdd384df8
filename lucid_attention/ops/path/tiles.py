"""LUCID's triangular system on PaTH scores, as tiles for the block solver: P_ij = exp(c (k̂_iᵀ H_i … H_{j+1} k̂_j − 1)).

The solver is that of `triangular.py` in the order of the tree: the tiles of a join are plain products of moved rows
and keys. Rows are c k/‖k‖; keys are those of the read-out, and their 1/‖k_j‖ is put in here, since a length commutes
with being moved.
"""

import math

import torch
from torch import Tensor

from ..exponential import FOLDED_SHIFT, ExponentialTiles
from ..triangular import Schedule
from .scores import Layout, PathScores
from .tree import Join

# Leaves of a diagonal block: as large as the blocks of plain LUCID.
BLOCK_LEAVES = 4
# Blocks whose scores are made, and taken back, in one go.
BLOCKS_AT_ONCE = 4


def path_schedule(picked: Schedule, layout: Layout) -> Schedule:
    """The schedule of plain LUCID, in the order of the tree and with its blocks."""
    block = layout.block
    return Schedule(picked.heads, block, max(picked.elements, block * block), tree=True)


class PathTiles(ExponentialTiles):
    """Tiles over S + T positions of the rows `which` of `scores`.

    inverse: [n, leaves, C, 1], 1/‖k‖; u_past: [n, S, D], k/‖k‖ of the past, moved to its end; sharpness: c, a number or
    [n, 1, 1].
    """

    def __init__(
        self,
        scores: PathScores,
        which: int,
        inverse: Tensor,
        u_past: Tensor | None,
        sharpness: float | Tensor,
        schedule: Schedule,
    ) -> None:
        alpha, shift = 1.0, None
        if isinstance(sharpness, Tensor):
            shift = sharpness
        elif sharpness > FOLDED_SHIFT:
            shift = inverse.new_full((1, 1, 1), sharpness)
        else:
            alpha = math.exp(-sharpness)
        super().__init__(scores.rows[which].flatten(1, 2), alpha, shift, schedule.elements)
        self.scores, self.which, self.inverse, self.u_past = scores, which, inverse, u_past
        self.S = 0 if u_past is None else u_past.shape[1]
        self._joins = {(join.size, join.first): join for join in scores.joins}
        self._keys = {place: join.k * join.left_of(inverse) for place, join in self._joins.items()}
        # Per block, as a factor of its columns.
        self._columns = inverse.flatten(1, 2).unflatten(1, (scores.layout.blocks, -1)).mT
        self._ready, self._ready_scores = slice(0, 0), inverse

    def make(self, rows: slice, cols: slice) -> Tensor:
        if rows != cols:
            return super().make(rows, cols)
        block, size = (rows.start - self.S) // self.scores.layout.block, rows.stop - rows.start
        if not self._ready.start <= block < self._ready.stop:
            self._ready = self._together(block)
            self._ready_scores = self.scores.block_scores(self.which, self._ready.start, self._ready.stop)
        n = self.u.shape[0]
        tile = self._tile[: n * size * size].view(n, size, size)
        raw = self._ready_scores[:, block - self._ready.start, :size, :size]
        torch.mul(raw, self._columns[:, block, :, :size], out=tile)
        return self.exponentiate_(tile, rows)

    def _together(self, block: int) -> slice:
        """The blocks that are made in one go with this one."""
        first = block - block % BLOCKS_AT_ONCE
        return slice(first, min(first + BLOCKS_AT_ONCE, self.scores.layout.blocks))

    def operands(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        if self.u_past is not None and cols.stop <= self.S:
            return self.u[:, self._new(rows)], self.u_past[:, cols]
        place, pair, rows, cols = self._find(rows, cols)
        return self._joins[place].rows[self.which][:, pair, rows], self._keys[place][:, pair, cols]

    def operand_grads(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        if self.du_past is not None and cols.stop <= self.S:
            return self.scores.drows[self.which].flatten(1, 2)[:, self._new(rows)], self.du_past[:, cols]
        place, pair, rows, cols = self._find(rows, cols)
        return self._joins[place].drows[self.which][:, pair, rows], self._dkeys[place][:, pair, cols]

    def _new(self, rows: slice) -> slice:
        return slice(rows.start - self.S, rows.stop - self.S)

    def _find(self, rows: slice, cols: slice) -> tuple[tuple[int, int], int, slice, slice]:
        """The join (its size and first leaf) and the pair that hold a tile, and where there."""
        rows, cols = self._new(rows), self._new(cols)
        layout = self.scores.layout
        right, left = rows.start // layout.block, cols.start // layout.block
        nodes = 1 << ((right ^ left).bit_length() - 1)
        pair, size = right // (2 * nodes), nodes * layout.L
        complete: Join | None = self._joins.get((size, 0))
        first = 0
        if complete is None or pair >= complete.pairs:
            first, pair = 2 * pair * size, 0
        start = (first + 2 * pair * size) * layout.C
        middle = start + size * layout.C
        in_node = slice(rows.start - middle, rows.stop - middle), slice(cols.start - start, cols.stop - start)
        return (size, first), pair, *in_node

    def collect_gradients(self, row_sums: bool) -> None:
        """As for other tiles. Gradients of rows and keys go to `scores`, which must be ready for them."""
        n, T = self.u.shape[:2]
        self.row_sums = self.u.new_zeros(n, self.S + T, 1) if row_sums else None
        self._grad = torch.empty_like(self._tile)
        self._block_grads: Tensor | None = None
        self._dkeys = {place: torch.zeros_like(keys) for place, keys in self._keys.items()}
        for join in self._joins.values():
            join.drows[self.which].zero_()
        self.dinverse = torch.zeros_like(self.inverse)
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
            self._blocks_pull_back(together, self._block_grads)
            self._block_grads = None

    def _blocks_pull_back(self, together: slice, grads: Tensor) -> None:
        """`_ready_scores` are those of the same blocks."""
        dinverse = self.dinverse.flatten(1, 2).unflatten(1, (self.scores.layout.blocks, -1))
        dinverse[:, together] += (grads * self._ready_scores).sum(2)[..., None]
        grads.mul_(self._columns[:, together])
        self.scores.block_pull_back(self.which, together.start, together.stop, grads)

    def finish(self) -> None:
        """Hand the gradients of the keys to `scores`, and add up those of `inverse`."""
        for place, join in self._joins.items():
            assert join.dk is not None
            dkeys = self._dkeys[place]
            join.left_of(self.dinverse).add_((dkeys * join.k).sum(-1, keepdim=True))
            join.dk += dkeys.mul_(join.left_of(self.inverse))
