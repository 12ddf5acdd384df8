"""The block solver of Y = (I + diag(β) L)⁻¹ diag(β) V and its adjoint, for any strictly lower L made of tiles.

The solver never sees how a tile is made: `Tiles` makes tiles of L and propagates their gradients. Everything works on
n heads at once, in place, on tensors [n, T, *]; `Schedule` has the number of heads and the size of a tile. On a CPU
that is one tile in the cache (a few with several threads), on an accelerator all heads in one batched product.

Order of work: right-looking. Once a block of rows is solved, the tiles that are due (`Schedule.due`) are subtracted
from the rows below: its column of tiles, or the rectangle of a tree. A tile costs two matrix products (make it, use it)
and lives only in between. The adjoint runs the same tiles backwards and makes each tile once more
(`docs/mathematics.md`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .threads import in_threads


@dataclass(frozen=True)
class Schedule:
    """How much is in flight: `heads` at once, diagonal blocks of `block`, tiles of at most `elements` per head.

    tree: which tiles are due once a block is solved. False: its column, down to the last row. True: the rectangle
    of the node of a binary tree of blocks that it completes, if it is a left one, with its right neighbour.
    """

    heads: int
    block: int
    elements: int
    tree: bool = False

    @property
    def rows(self) -> int:
        """Rows of a tile that is one block wide."""
        return max(1, self.elements // self.block)

    def groups(self, B: int, H: int) -> Iterator[tuple[slice, slice]]:
        """Slices (batch, heads) of at most `heads` heads each, which cover [B, H]."""
        if self.heads >= H:
            for b in spans(0, B, self.heads // H):
                yield b, slice(0, H)
        else:
            for b in spans(0, B, 1):
                for h in spans(0, H, self.heads):
                    yield b, h

    def run(self, work: Callable[[tuple[slice, slice]], object], k: Tensor) -> None:
        """work(group) for the groups of k: [B, H, *], on a CPU in threads of their own."""
        groups = list(self.groups(*k.shape[:2]))
        threads = torch.get_num_threads() if k.device.type == "cpu" else 1
        # What would leave a thread idle is divided product by product.
        divided = len(groups) % threads
        for group in groups[:divided]:
            work(group)
        in_threads(work, groups[divided:], threads)

    def due(self, block: slice, T: int) -> Iterator[tuple[slice, slice]]:
        """The tiles (rows, cols) to subtract once [block] is solved, in a system of T rows."""
        cols, stop = block, T
        if self.tree:
            count = -(-block.stop // self.block)
            node = (count & -count) * self.block
            cols, stop = slice(count * self.block - node, block.stop), min(T, block.stop + node)
        for rows in spans(block.stop, stop, self.rows):
            for piece in spans(cols.start, cols.stop, self.block):
                yield rows, piece


# Elements of a tile: about 1 MB of float32, half of the L2 cache of a CPU core; 256 MB over all heads elsewhere.
CPU_TILE = 1024 * 256
ACCELERATOR_TILE = 64 * 1024 * 1024
# Below this shift e^c · e^−c is harmless in float32, and the factor e^−c is part of the matrix products at no cost.
FOLDED_SHIFT = 40.0
# exp(x) = 2^(x log₂ e). The factor is part of the products, and powers of two take the same time on every CPU: torch's
# exponential is six times slower on CPUs for which MKL has none.
LOG2E = math.log2(math.e)


def pick_schedule(device: torch.device, heads: int, new: int, past: int = 0, *, by_heads: bool = False) -> Schedule:
    """The schedule for `heads` systems of `new` rows after `past` solved ones on `device`.

    by_heads: for `Schedule.run`, where on a CPU each thread has heads of its own, if there are enough.
    """
    largest, budget, most = ACCELERATOR_TILE, ACCELERATOR_TILE, heads
    if device.type == "cpu":
        threads = torch.get_num_threads()
        if by_heads and heads >= threads:
            largest, budget, most = 2 * CPU_TILE, CPU_TILE, heads // threads
        else:
            # Threads share the work best as whole products of different heads, with two for each to even out.
            largest, budget = 2 * CPU_TILE, CPU_TILE * (2 * threads if threads > 1 else 1)
    block = min(256, new)
    at_once = max(1, min(most, budget // (block * min(1024, new + past))))
    elements = max(block * block, min(budget // at_once, largest, new * (new + past)))
    return Schedule(heads=at_once, block=block, elements=elements)


def spans(start: int, stop: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` that cover [start, stop)."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


class Tiles(Protocol):
    """Tiles of L over S + T positions: the S of the past, then the T of the system."""

    alpha: float
    """L = alpha · tile: a common factor that costs nothing inside a matrix product."""

    def make(self, rows: slice, cols: slice) -> Tensor:
        """The tile L[rows, cols] / alpha as [n, R, C], valid until the next call."""

    def pull_back(self, rows: slice, cols: slice, tile: Tensor, left: Tensor, right: Tensor, diagonal: bool) -> None:
        """Add the gradient dL[rows, cols] = −left · rightᵀ, its strictly lower part if `diagonal`. Keeps `tile`."""


class Diagonal(Protocol):
    """What replaces the unit lower triangular solves on the diagonal: symmetric blocks (`blocks.py`)."""

    def steps(self) -> list[slice]:
        """The columns of each diagonal step, in order."""

    def solve_(self, y: Tensor, tiles: Tiles, cols: slice, S: int, mask: Tensor | None) -> None:
        """y ← P⁻¹ y for the part [cols] of P."""

    def solve_adjoint_(
        self, g: Tensor, y: Tensor, tiles: Tiles, cols: slice, S: int, mask: Tensor | None, *, tile_grads: bool
    ) -> None:
        """g ← P⁻ᵀ g, and the gradients of this part to `tiles` if `tile_grads`."""


def solve_unit_lower(matrix: Tensor, y: Tensor) -> Tensor:
    """(I + stril matrix)⁻¹ y with gradients: [..., C, C], [..., C, E] -> [..., C, E]."""
    return torch.linalg.solve_triangular(matrix.mT, y.mT, upper=True, left=False, unitriangular=True).mT


def solve_unit_lower_(matrix: Tensor, y: Tensor) -> None:
    """y ← (I + stril matrix)⁻¹ y in place: [n, C, C], [n, C, E]. Entries on and above the diagonal are not read.

    Solved from the right on transposed views: row-major storage is then what LAPACK wants, and nothing is copied.
    """
    torch.linalg.solve_triangular(matrix.mT, y.mT, upper=True, left=False, unitriangular=True, out=y.mT)


def solve_unit_lower_transposed_(matrix: Tensor, y: Tensor) -> None:
    """y ← (I + stril matrix)⁻ᵀ y in place: [n, C, C], [n, C, E]."""
    torch.linalg.solve_triangular(matrix, y.mT, upper=False, left=False, unitriangular=True, out=y.mT)


def subtract_product_(target: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """target ← target − alpha · left · right in place: [n, R, C], [n, R, K], [n, K, C]."""
    if target.shape[0] == 1 or target.device.type != "cpu":
        target.baddbmm_(left, right, alpha=-alpha)
    else:
        # On a CPU torch would run this view head by head. A separate product spreads heads over the threads.
        target.sub_(torch.bmm(left, right), alpha=alpha)


def _at(cols: slice, offset: int) -> slice:
    return slice(cols.start + offset, cols.stop + offset)


def _past_tiles(T: int, S: int, schedule: Schedule) -> Iterator[tuple[slice, slice]]:
    """Tiles of the S columns of the past: few rows make room for wide tiles."""
    for rows in spans(0, T, schedule.rows):
        for cols in spans(0, S, max(1, schedule.elements // (rows.stop - rows.start))):
            yield rows, cols


def solve_(
    y: Tensor,
    tiles: Tiles,
    schedule: Schedule,
    beta: Tensor | None = None,
    z: Tensor | None = None,
    y_past: Tensor | None = None,
    diagonal_blocks: Diagonal | None = None,
) -> None:
    """Overwrite V with Y in place.

    y: [n, T, E], V on entry, Y on return; beta: [n, T, 1]; y_past: [n, S, E], rows solved earlier.
    diagonal_blocks: of tokens that see each other; beta is then a mask of zeros and ones.
    z: [n, T, E], written if not None: V − L Y, so that Y = β Z. The adjoint of β needs it: at β = 0 it is not in Y.
    """
    T = y.shape[1]
    S = 0 if y_past is None else y_past.shape[1]
    if y_past is not None:
        for rows, cols in _past_tiles(T, S, schedule):
            subtract_product_(y[:, rows], tiles.make(_at(rows, S), cols), y_past[:, cols], tiles.alpha)
    for cols in spans(0, T, schedule.block) if diagonal_blocks is None else diagonal_blocks.steps():
        solved = y[:, cols]
        if diagonal_blocks is not None:
            diagonal_blocks.solve_(solved, tiles, cols, S, None if beta is None else beta[:, cols])
        else:
            diagonal = tiles.make(_at(cols, S), _at(cols, S)).mul_(tiles.alpha)
            if beta is not None:
                diagonal.mul_(beta[:, cols].mT)
            solve_unit_lower_(diagonal, solved)
            if z is not None:
                z[:, cols] = solved
            if beta is not None:
                solved.mul_(beta[:, cols])
        for rows, done in schedule.due(cols, T):
            tile = tiles.make(_at(rows, S), _at(done, S))
            subtract_product_(y[:, rows], tile, y[:, done], tiles.alpha)


def solve_adjoint_(
    g: Tensor,
    y: Tensor,
    tiles: Tiles,
    schedule: Schedule,
    *,
    tile_grads: bool = True,
    beta: Tensor | None = None,
    z: Tensor | None = None,
    dbeta: Tensor | None = None,
    y_past: Tensor | None = None,
    dy_past: Tensor | None = None,
    diagonal_blocks: Diagonal | None = None,
) -> None:
    """Overwrite dY with dV in place, and pass the gradient of every tile to `tiles` if `tile_grads`.

    g, y: [n, T, E]; beta, dbeta: [n, T, 1] with z: [n, T, E] as `solve_` wrote it; y_past, dy_past: [n, S, E], the
    latter zero on entry; diagonal_blocks: as in `solve_`.
    """
    T = y.shape[1]
    S = 0 if y_past is None else y_past.shape[1]
    steps = list(spans(0, T, schedule.block)) if diagonal_blocks is None else diagonal_blocks.steps()
    for cols in reversed(steps):
        here = g[:, cols]
        for rows, done in schedule.due(cols, T):
            tile = tiles.make(_at(rows, S), _at(done, S))
            subtract_product_(g[:, done], tile.mT, g[:, rows], tiles.alpha)
            if tile_grads:
                tiles.pull_back(_at(rows, S), _at(done, S), tile, g[:, rows], y[:, done], False)
        if diagonal_blocks is not None:
            mask = None if beta is None else beta[:, cols]
            diagonal_blocks.solve_adjoint_(here, y[:, cols], tiles, cols, S, mask, tile_grads=tile_grads)
            continue
        diagonal = tiles.make(_at(cols, S), _at(cols, S))
        system = diagonal * tiles.alpha if beta is None else diagonal * (tiles.alpha * beta[:, cols])
        solve_unit_lower_transposed_(system, here)
        if dbeta is not None and z is not None:
            torch.sum(z[:, cols] * here, dim=-1, keepdim=True, out=dbeta[:, cols])
        if beta is not None:
            here.mul_(beta[:, cols])
        if tile_grads:
            tiles.pull_back(_at(cols, S), _at(cols, S), diagonal, here, y[:, cols], True)
    if y_past is not None and dy_past is not None:
        for rows, cols in _past_tiles(T, S, schedule):
            tile = tiles.make(_at(rows, S), cols)
            subtract_product_(dy_past[:, cols], tile.mT, g[:, rows], tiles.alpha)
            if tile_grads:
                tiles.pull_back(_at(rows, S), cols, tile, g[:, rows], y_past[:, cols], False)


class Algebra:
    """Products and triangular solves, by torch: batches [..., I, K] · [..., K, J] and solves with [m, C, C]."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a · b."""
        return a @ b

    def plus_product(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        """c + alpha · a · b for batches of one dimension; c may be broadcast."""
        return torch.baddbmm(c, a, b, alpha=alpha)

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        """c ← beta · c + alpha · a · b in place, for batches of one dimension."""
        return c.baddbmm_(a, b, alpha=alpha, beta=beta)

    def solve_(self, matrix: Tensor, y: Tensor) -> None:
        """y ← (I + stril matrix)⁻¹ y in place. Entries on and above the diagonal are not read."""
        solve_unit_lower_(matrix, y)

    def solve_transposed_(self, matrix: Tensor, y: Tensor) -> None:
        """y ← (I + stril matrix)⁻ᵀ y in place."""
        solve_unit_lower_transposed_(matrix, y)


TORCH = Algebra()


class ExponentialTiles:
    """Tiles of L for n heads, of which u: [n, S + T, D] are the features.

    shift: None (folded into alpha), or [n, 1, 1], or [n, S + T, 1].
    """

    def __init__(self, u: Tensor, alpha: float, shift: Tensor | None, elements: int) -> None:
        self.u, self.alpha, self.shift = u, alpha, shift
        self._tile = u.new_empty(u.shape[0] * elements)

    def make(self, rows: slice, cols: slice) -> Tensor:
        left, right = self.operands(rows, cols)
        tile = self._tile[: left.shape[0] * left.shape[1] * right.shape[1]].view(*left.shape[:2], right.shape[1])
        return self.powers_(tile.baddbmm_(left, right.mT, beta=0, alpha=LOG2E), rows)

    def powers_(self, scores: Tensor, rows: slice) -> Tensor:
        """2^(scores − shift · log₂ e) in place, for exponents times log₂ e."""
        if self.shift is not None:
            scores.sub_(self.shift if self.shift.shape[1] == 1 else self.shift[:, rows], alpha=LOG2E)
        return scores.exp2_()

    def operands(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """left: [n, R, D], right: [n, C, D], whose product is the tile's exponent."""
        return self.u[:, rows], self.u[:, cols]

    def operand_grads(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Where the gradients of `operands` add up."""
        return self.du[:, rows], self.du[:, cols]

    def collect_gradients(self, row_sums: bool) -> None:
        """Allocate what `pull_back` adds to: `du` and, if `row_sums`, `row_sums` = Σ_j dS_ij, S = log L."""
        self.du = torch.zeros_like(self.u)
        self.row_sums = self.u.new_zeros(*self.u.shape[:2], 1) if row_sums else None
        self._grad = torch.empty_like(self._tile)

    def pull_back(self, rows: slice, cols: slice, tile: Tensor, left: Tensor, right: Tensor, diagonal: bool) -> None:
        w = self.score_grads(rows, tile, left, right, diagonal)
        rows_u, cols_u = self.operands(rows, cols)
        rows_du, cols_du = self.operand_grads(rows, cols)
        subtract_product_(rows_du, w, cols_u, self.alpha)
        subtract_product_(cols_du, w.mT, rows_u, self.alpha)

    def score_grads(self, rows: slice, tile: Tensor, left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
        """−dS / alpha of a tile: [n, R, C], valid until the next call."""
        w = self._grad[: tile.numel()].view(tile.shape)
        torch.bmm(left, right.mT, out=w).mul_(tile)
        if diagonal:
            w.tril_(-1)
        if self.row_sums is not None:
            self.row_sums[:, rows].sub_(w.sum(-1, keepdim=True), alpha=self.alpha)
        return w
