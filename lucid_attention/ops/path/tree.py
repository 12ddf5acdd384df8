"""PaTH scores as a binary tree: the triangle of scores cut into one rectangle for each pair of neighbouring nodes.

A node is a run of leaves. Its rows stand re-based to its start, its keys to its end, so that the scores of a right
node b against its left neighbour a are one plain product, q_b k_aᵀ. One level up:

    q_b ← q_b M_a        k_a ← k_a M_bᵀ        M_ab = M_b M_a

That is O(T D²) for each of the log T levels, with contractions only. A last node that is not complete is only ever a
right one: its keys and its product are never needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# From nodes of this many positions on, products of contractions reach into denormal numbers, which slow down
# matrix products by an order of magnitude. Below eps² of a unit vector nothing is lost.
CUT_FROM = 512


@dataclass
class Join:
    """Pairs of neighbours of one level: nodes of `size` leaves, the first pair starting at leaf `first`.

    q: [n, pairs, rows, D] of the right nodes and k: [n, pairs, keys, D] of the left ones, both before they move up.
    left: [n, pairs, D, D], products of the left nodes; right: of the right ones, None for an incomplete node.
    """

    first: int
    pairs: int
    size: int
    last: int
    q: Tensor
    k: Tensor
    left: Tensor
    right: Tensor | None
    dq: Tensor | None = None
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


def _cut(x: Tensor, positions: int, out: Tensor) -> Tensor:
    """Write x into out, without what is too small to matter in nodes of so many positions."""
    if positions < CUT_FROM:
        return out.copy_(x)
    return torch.ops.aten.hardshrink.out(x, torch.finfo(x.dtype).eps ** 2, out=out)


def climb(q: Tensor, k: Tensor, product: Tensor, *, keep_below: int, to_the_root: bool) -> Iterator[Join]:
    """Visit all joins from the leaves up, each before its nodes move up. q and k are moved in place.

    q: [n, leaves, rows, D], k: [n, leaves, keys, D], product: [n, leaves, D, D], as leaves are; contiguous.
    keep_below: joins of nodes of fewer leaves hold copies that stay valid; the others views, until the next join.
    to_the_root: move the last level as well, which leaves in q all rows re-based to the start of everything.
    """
    leaves, size = q.shape[1], 1
    while size < leaves:
        pairs = leaves // (2 * size)
        rest = leaves - 2 * size * pairs
        above = product.new_empty(product.shape[0], pairs, *product.shape[2:])
        moves, keep = to_the_root or 2 * size < leaves, size < keep_below
        if pairs:
            left, right = product[:, : 2 * pairs : 2], product[:, 1 : 2 * pairs : 2]
            yield from _join(q, k, left, right, (0, pairs, size, 2 * size * pairs), keep, moves)
            if moves:
                _cut(right @ left, 2 * size * k.shape[2], out=above)
        if rest > size:
            lonely = product[:, 2 * pairs : 2 * pairs + 1]
            yield from _join(q, k, lonely, None, (2 * size * pairs, 1, size, leaves), keep, moves)
        product, size = above, 2 * size


def _join(
    q: Tensor,
    k: Tensor,
    left: Tensor,
    right: Tensor | None,
    place: tuple[int, int, int, int],
    keep: bool,
    moves: bool,
) -> Iterator[Join]:
    first, pairs, size, last = place
    join = Join(first, pairs, size, last, q, k, left, right)
    rows, keys = join.right_of(q), join.left_of(k)
    join.q, join.k = (rows.clone(), keys.clone()) if keep else (rows, keys)
    yield join
    if moves:
        positions = 2 * size * k.shape[2]
        _cut(join.q @ left, positions, out=rows)
        if right is not None:
            _cut(join.k @ right.mT, positions, out=keys)


def descend(joins: list[Join], q: Tensor, k: Tensor, droot_rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The adjoint of `climb`: gradients of the leaves' q, k (in the shapes given) and products.

    joins: as visited, each with the gradients dq and dk of its rectangle. droot_rows: gradient of q at the root.
    """
    n, leaves, _, D = q.shape
    dq = torch.zeros_like(q) if droot_rows is None else droot_rows.clone()
    dk = torch.zeros_like(k)
    to_the_root = droot_rows is not None
    sizes = sorted({join.size for join in joins}, reverse=True)
    above = q.new_zeros(n, leaves // (2 * sizes[0]) if sizes else leaves, D, D)
    for size in sizes:
        here = q.new_zeros(n, leaves // size, D, D)
        for join in joins:
            if join.size == size:
                _leave(join, dq, dk, above, here, moved=to_the_root or 2 * size < leaves)
        above = here
    return dq, dk, above


def _leave(join: Join, dq: Tensor, dk: Tensor, above: Tensor, here: Tensor, *, moved: bool) -> None:
    """Take the gradients of one join down a level. above, here: gradients of the products of both levels."""
    assert join.dq is not None
    assert join.dk is not None
    rows, keys = join.right_of(dq), join.left_of(dk)
    if not moved:
        rows += join.dq
        keys += join.dk
        return
    node = join.first // join.size
    dleft = here[:, node : node + 2 * join.pairs : 2]
    dleft += join.q.mT @ rows
    rows.copy_(rows @ join.left.mT)
    rows += join.dq
    if join.right is not None:
        dright = here[:, node + 1 : node + 2 * join.pairs : 2]
        dright += keys.mT @ join.k
        keys.copy_(keys @ join.right)
        dproduct = above[:, : join.pairs]
        dright += dproduct @ join.left.mT
        dleft += join.right.mT @ dproduct
    keys += join.dk
