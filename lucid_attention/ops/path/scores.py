"""PaTH scores of some heads, block by block and join by join, and the way of their gradients back to q, k, w and β.

Rows are G sets of queries for each key/value head (or the keys themselves, in LUCID's system). Everything is cut into
leaves of C positions; L leaves make a block, whose scores are one dense matrix; joins of larger nodes are rectangles.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from .algebra import TORCH, Algebra
from .leaves import KeySideGradients, key_side, key_side_backward, row_side, row_side_backward
from .tree import Join, climb, descend

LEAF = 64


@dataclass(frozen=True)
class Layout:
    """T positions as `leaves` leaves of C; blocks of L leaves. What is missing at the end is filled with zeros."""

    T: int
    C: int
    L: int
    leaves: int

    @staticmethod
    def of(T: int, block_leaves: int = 1) -> "Layout":
        """block_leaves: L for a long sequence, a power of two."""
        if T <= LEAF:
            return Layout(T, T, 1, 1)
        enough = -(-T // LEAF)
        L = min(block_leaves, 1 << (enough - 1).bit_length())
        return Layout(T, LEAF, L, -(-enough // L) * L)

    @staticmethod
    def of_whole_blocks(T: int, block_leaves: int = 1) -> "Layout":
        """Leaves and blocks of one size, however short T is."""
        blocks = -(-T // (LEAF * block_leaves))
        return Layout(T, LEAF, block_leaves, blocks * block_leaves)

    @property
    def blocks(self) -> int:
        return self.leaves // self.L

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.L * self.C

    def cut(self, x: Tensor) -> Tensor:
        """[n, T, *] -> [n, leaves, C, *]."""
        return self._pad(x).unflatten(1, (self.leaves, self.C))

    def join(self, x: Tensor) -> Tensor:
        """[n, leaves, C, *] -> [n, T, *]."""
        return x.flatten(1, 2)[:, : self.T]

    def cut_rows(self, x: Tensor) -> Tensor:
        """[n, G, T, *] -> [n, leaves, G · C, *]: the sets of a leaf stand together."""
        return self._pad(x).unflatten(2, (self.leaves, self.C)).transpose(1, 2).flatten(2, 3)

    def join_rows(self, x: Tensor) -> Tensor:
        """[n, leaves, G · C, *] -> [n, G, T, *]."""
        return x.unflatten(2, (-1, self.C)).transpose(1, 2).flatten(2, 3)[:, :, : self.T]

    def _pad(self, x: Tensor) -> Tensor:
        missing = self.leaves * self.C - self.T
        return F.pad(x, (0, 0, 0, missing)) if missing else x


class PathScores:
    """The scores of n heads: sets of rows against one set of keys.

    rows: sets of [n, leaves, G·C, D]; k, w: [n, leaves, C, D]; beta: [n, leaves, C, 1], as `Layout` cuts them.
    to_the_root: also move all rows to the start of the sequence, where a past is read: `rows` after all joins.
    keep: joins stay valid, as gradients need; otherwise they are views, for one walk through `joins`.
    algebra: makes all products.
    """

    def __init__(
        self,
        layout: Layout,
        rows: list[Tensor],
        k: Tensor,
        w: Tensor,
        beta: Tensor,
        *,
        to_the_root: bool,
        keep: bool,
        algebra: Algebra = TORCH,
    ) -> None:
        self.layout, self._n, self._algebra = layout, k.shape[0], algebra
        self._q = [x.flatten(0, 1) for x in rows]
        self._k, self._w, self._beta = (x.flatten(0, 1) for x in (k, w, beta))
        self._keys = key_side(self._k, self._w, self._beta, algebra)
        self._sides = [row_side(q, self._k, self._w, self._keys, algebra) for q in self._q]
        self.rows = [self._heads(side.rows) for side in self._sides]
        self._to_the_root = to_the_root
        kept = layout.leaves if keep else layout.L
        moved_k, products = self._heads(self._keys.k), self._heads(self._keys.product)
        joins = climb(self.rows, moved_k, products, keep_below=kept, to_the_root=to_the_root, algebra=algebra)
        # Inside a block every level is complete: one join for each.
        self.inner = list(islice(joins, layout.L.bit_length() - 1))
        self.joins: Iterable[Join] = list(joins) if keep else joins

    def all_joins(self) -> Iterable[Join]:
        return chain(self.inner, self.joins)

    def leaf_scores(self, which: int) -> Tensor:
        """Scores inside leaves: [n, leaves, G·C, C], lower triangular."""
        return self._heads(self._sides[which].scores)

    def block_scores(self, which: int, first: int, last: int) -> Tensor:
        """Scores inside blocks [first, last): [n, blocks, L·G·C, L·C]. What is above the diagonal is arbitrary."""
        L = self.layout.L
        scores = self._blocks(self.leaf_scores(which))[:, first:last]
        n, b, _, rows, C = scores.shape
        out = scores.new_zeros(n, b, L, rows, L, C)
        for leaf in range(L):
            out[:, :, leaf, :, leaf] = scores[:, :, leaf]
        for join in self.inner:
            q, k = (self._per_block(x)[:, first:last] for x in (join.rows[which], join.k))
            rectangles = self._algebra.product(q, k.mT).unflatten(3, (join.size, rows)).unflatten(5, (join.size, C))
            for pair, (right, left) in enumerate(_pairs_of_a_block(L, join.size)):
                out[:, :, right, :, left] = rectangles[:, :, pair]
        return out.view(n, b, L * rows, L * C)

    def collect_gradients(self) -> None:
        """Get ready for gradients: every leaf and join of every set of rows has to be written, keys to be added to."""
        self._dscores = [torch.empty_like(side.scores) for side in self._sides]
        self.drows = [torch.zeros_like(rows) for rows in self.rows]
        for join in self.all_joins():
            join.drows, join.dk = [torch.empty_like(x) for x in join.rows], torch.zeros_like(join.k)

    def leaf_pull_back(self, which: int, grad: Tensor) -> None:
        """Take in the gradient of `leaf_scores`, zero above the diagonal."""
        self._dscores[which] = grad.flatten(0, 1)

    def block_pull_back(self, which: int, first: int, last: int, grad: Tensor) -> None:
        """Take in the gradient of `block_scores`, zero above the diagonal."""
        L, C = self.layout.L, self.layout.C
        n, b, rows, _ = grad.shape
        grad = grad.view(n, b, L, rows // L, L, C)
        dscores = self._blocks(self._heads(self._dscores[which]))[:, first:last]
        for leaf in range(L):
            dscores[:, :, leaf] = grad[:, :, leaf, :, leaf]
        for join in self.inner:
            assert join.dk is not None
            pairs = _pairs_of_a_block(L, join.size)
            ds = torch.stack([grad[:, :, right, :, left].flatten(4).flatten(2, 3) for right, left in pairs], 2)
            self._per_block(join.drows[which])[:, first:last] = self._algebra.product(
                ds, self._per_block(join.k)[:, first:last]
            )
            self._per_block(join.dk)[:, first:last] += self._algebra.product(
                ds.mT, self._per_block(join.rows[which])[:, first:last]
            )

    def pull_back(self) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Gradients of the sets of rows, k, w and beta, as they came, from those of leaves, joins and root."""
        dk = self._heads(torch.zeros_like(self._k))
        dproduct = descend(
            list(self.all_joins()), self.drows, dk, from_the_root=self._to_the_root, algebra=self._algebra
        )
        into = KeySideGradients(self._k)
        dq = [
            row_side_backward(
                dscores, drows.flatten(0, 1), q, self._k, self._w, self._keys, side.x, into, self._algebra
            )
            for dscores, drows, q, side in zip(self._dscores, self.drows, self._q, self._sides, strict=True)
        ]
        made = key_side_backward(
            dk.flatten(0, 1), dproduct.flatten(0, 1), self._k, self._w, self._beta, self._keys, into, self._algebra
        )
        dk, dw, dbeta = (self._heads(x) for x in made)
        return [self._heads(x) for x in dq], dk, dw, dbeta

    def _heads(self, x: Tensor) -> Tensor:
        """[n · leaves, *] -> [n, leaves, *]."""
        return x.unflatten(0, (self._n, -1))

    def _blocks(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.layout.blocks, self.layout.L))

    def _per_block(self, x: Tensor) -> Tensor:
        """[n, pairs, *] of an inner join -> [n, blocks, pairs of a block, *]."""
        return x.unflatten(1, (self.layout.blocks, -1))


def _pairs_of_a_block(L: int, size: int) -> list[tuple[slice, slice]]:
    """The leaves (right, left) of every pair of nodes of `size` leaves within a block of L."""
    return [(slice(a + size, a + 2 * size), slice(a, a + size)) for a in range(0, L, 2 * size)]
