"""PaTH scores as a binary tree: the triangle of scores cut into one rectangle for each pair of neighbouring nodes.

A node is a run of leaves. Its rows are moved to its start, its keys to its end, so that the scores of a right
node b against its left neighbour a are one plain product, q_b k_aᵀ. One level up:

    q_b ← q_b M_a        k_a ← k_a M_bᵀ        M_ab = M_b M_a

That is O(T D²) for each of the log T levels, with contractions only. A last node that is not complete is only ever a
right one: its keys and its product are never needed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .algebra import TORCH, Algebra

# From nodes of this many positions on, products of contractions reach into denormal numbers, which slow down
# matrix products of a CPU by an order of magnitude. Below eps² of the largest number nothing is lost.
CUT_FROM = 512


@dataclass
class Join:
    """Pairs of neighbours of one level: nodes of `size` leaves, the first pair starting at leaf `first`.

    rows: sets of [n, pairs, R, D] of the right nodes and k: [n, pairs, K, D] of the left ones, before they move up.
    left: [n, pairs, D, D], products of the left nodes; right: of the right ones, None for an incomplete node.
    drows, dk: gradients of the rectangles, for `descend`.
    """

    first: int
    pairs: int
    size: int
    last: int
    rows: list[Tensor]
    k: Tensor
    left: Tensor
    right: Tensor | None
    drows: list[Tensor] = field(default_factory=list)
    dk: Tensor | None = None

    def right_of(self, x: Tensor) -> Tensor:
        """The right nodes' part of x: [n, leaves, c, *] -> [n, pairs, leaves of a node · c, *], a view."""
        return self._nodes(x, self.first + self.size, self.last)

    def left_of(self, x: Tensor) -> Tensor:
        return self._nodes(x, self.first, self.last - self._right_leaves)

    @property
    def _right_leaves(self) -> int:
        """Leaves of the last right node."""
        return self.last - self.first - (2 * self.pairs - 1) * self.size

    def _nodes(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self.pairs == 1:
            return x[:, start:stop].flatten(1, 2)[:, None]
        every_other = x[:, start : start + (2 * self.pairs - 1) * self.size]
        shape = (x.shape[0], self.pairs, self.size * x.shape[2], *x.shape[3:])
        step = 2 * self.size * x.stride(1)
        return every_other.as_strided(shape, (x.stride(0), step, *x.stride()[2:]))


def _floor(x: Tensor, positions: int) -> float:
    """Entries of x below this size are set to zero; 0 keeps all."""
    if positions < CUT_FROM or x.device.type != "cpu":
        return 0.0
    largest = float(x.abs().amax())
    return largest * torch.finfo(x.dtype).eps ** 2 if math.isfinite(largest) else 0.0


def _write(x: Tensor, floor: float, positions: int, out: Tensor) -> None:
    """Write x into out; from CUT_FROM positions on, entries below `floor` become zero."""
    if floor == 0.0 or positions < CUT_FROM:
        out.copy_(x)
    else:
        torch.ops.aten.hardshrink.out(x, floor, out=out)


def climb(
    rows: list[Tensor],
    k: Tensor,
    product: Tensor,
    *,
    keep_below: int,
    to_the_root: bool,
    algebra: Algebra = TORCH,
) -> Iterator[Join]:
    """Visit all joins from the leaves up, each before its nodes move up. rows and k are moved in place.

    rows: sets of [n, leaves, R, D]; k: [n, leaves, C, D]; product: [n, leaves, D, D], as leaves are; contiguous.
    keep_below: joins of nodes of fewer leaves hold copies that stay valid; the others views, until the next join.
    to_the_root: move the last level as well, which leaves all rows moved to the start of everything.
    """
    leaves, size, positions = k.shape[1], 1, k.shape[1] * k.shape[2]
    floors = [_floor(x, positions) for x in (*rows, k, product)]
    while size < leaves:
        pairs = leaves // (2 * size)
        rest = leaves - 2 * size * pairs
        above = product.new_empty(product.shape[0], pairs, *product.shape[2:])
        moves, keep = to_the_root or 2 * size < leaves, size < keep_below
        if pairs:
            left, right = product[:, : 2 * pairs : 2], product[:, 1 : 2 * pairs : 2]
            yield from _join(rows, k, left, right, (0, pairs, size, 2 * size * pairs), floors, keep, moves, algebra)
            if moves:
                _write(algebra.product(right, left), floors[-1], 2 * size * k.shape[2], out=above)
        if rest > size:
            lonely = product[:, 2 * pairs : 2 * pairs + 1]
            yield from _join(rows, k, lonely, None, (2 * size * pairs, 1, size, leaves), floors, keep, moves, algebra)
        product, size = above, 2 * size


def _join(
    rows: list[Tensor],
    k: Tensor,
    left: Tensor,
    right: Tensor | None,
    place: tuple[int, int, int, int],
    floors: list[float],
    keep: bool,
    moves: bool,
    algebra: Algebra,
) -> Iterator[Join]:
    first, pairs, size, last = place
    join = Join(first, pairs, size, last, rows, k, left, right)
    mine, keys = [join.right_of(x) for x in rows], join.left_of(k)
    join.rows, join.k = ([x.clone() for x in mine], keys.clone()) if keep else (mine, keys)
    yield join
    if moves:
        positions = 2 * size * k.shape[2]
        for here, before, floor in zip(mine, join.rows, floors, strict=False):
            _write(algebra.product(before, left), floor, positions, out=here)
        if right is not None:
            _write(algebra.product(join.k, right.mT), floors[len(rows)], positions, out=keys)


def descend(
    joins: list[Join], drows: list[Tensor], dk: Tensor, *, from_the_root: bool, algebra: Algebra = TORCH
) -> Tensor:
    """The adjoint of `climb`: take gradients of rows and keys from the root to the leaves in place.

    joins: as visited, each with its drows and dk. drows: sets of [n, leaves, R, D], of the rows at the root if
    from_the_root, otherwise zero; dk: [n, leaves, C, D], zero. Returns the gradient of the products of the leaves.
    """
    n, leaves, _, D = dk.shape
    sizes = sorted({join.size for join in joins}, reverse=True)
    above = dk.new_zeros(n, leaves // (2 * sizes[0]) if sizes else leaves, D, D)
    for size in sizes:
        here = dk.new_zeros(n, leaves // size, D, D)
        for join in joins:
            if join.size == size:
                _leave(join, drows, dk, above, here, algebra, moved=from_the_root or 2 * size < leaves)
        above = here
    return above


def _leave(
    join: Join, drows: list[Tensor], dk: Tensor, above: Tensor, here: Tensor, algebra: Algebra, *, moved: bool
) -> None:
    """Take the gradients of one join down a level. above, here: gradients of the products of both levels."""
    assert join.dk is not None
    keys, node = join.left_of(dk), join.first // join.size
    dleft = here[:, node : node + 2 * join.pairs : 2]
    for all_drows, before, grad in zip(drows, join.rows, join.drows, strict=True):
        rows = join.right_of(all_drows)
        if moved:
            dleft += algebra.product(before.mT, rows)
            rows.copy_(algebra.product(rows, join.left.mT))
        rows += grad
    if moved and join.right is not None:
        dright = here[:, node + 1 : node + 2 * join.pairs : 2]
        dright += algebra.product(keys.mT, join.k)
        keys.copy_(algebra.product(keys, join.right))
        dproduct = above[:, : join.pairs]
        dright += algebra.product(dproduct, join.left.mT)
        dleft += algebra.product(join.right.mT, dproduct)
    keys += join.dk
