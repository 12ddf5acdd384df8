"""PaTH scores of some heads, block by block and join by join, and the way of their gradients back to q, k, w and β.

Rows are G sets of queries for each key/value head (or the keys themselves, in LUCID's system). Everything is cut into
leaves of C positions; L leaves make a block, whose scores are one dense matrix; joins of larger nodes are rectangles.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from .leaves import LeafGradients, Leaves, leaves, leaves_backward
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
    """The scores of n heads.

    q: [n, leaves, G·C, D] rows; k, w: [n, leaves, C, D]; beta: [n, leaves, C, 1], as `Layout` cuts them.
    to_the_root: also re-base all rows to the start of the sequence, where a past is read: `rows` after all joins.
    keep: joins stay valid, as gradients need; otherwise they are views, for one walk through `joins`.
    """

    def __init__(
        self, layout: Layout, q: Tensor, k: Tensor, w: Tensor, beta: Tensor, *, to_the_root: bool, keep: bool
    ) -> None:
        self.layout, n = layout, q.shape[0]
        self._q, self._k, self._w, self._beta = (x.flatten(0, 1) for x in (q, k, w, beta))
        made, self._saved = leaves(self._q, self._k, self._w, self._beta)
        self._scores, self.rows, keys, products = (x.unflatten(0, (n, -1)) for x in made)
        kept = layout.leaves if keep else layout.L
        joins = climb(self.rows, keys, products, keep_below=kept, to_the_root=to_the_root)
        # Inside a block every level is complete: one join for each.
        self._inner = list(islice(joins, layout.L.bit_length() - 1))
        self.joins: Iterable[Join] = list(joins) if keep else joins

    def block_scores(self, first: int, last: int) -> Tensor:
        """Scores inside blocks [first, last): [n, blocks, L·G·C, L·C]. What is above the diagonal is arbitrary."""
        L = self.layout.L
        scores = self._blocks(self._scores)[:, first:last]
        n, b, _, rows, C = scores.shape
        out = scores.new_zeros(n, b, L, rows, L, C)
        for leaf in range(L):
            out[:, :, leaf, :, leaf] = scores[:, :, leaf]
        for join in self._inner:
            q, k = (self._per_block(x)[:, first:last] for x in (join.q, join.k))
            rectangles = (q @ k.mT).unflatten(3, (join.size, rows)).unflatten(5, (join.size, C))
            for pair, (right, left) in enumerate(_pairs_of_a_block(L, join.size)):
                out[:, :, right, :, left] = rectangles[:, :, pair]
        return out.view(n, b, L * rows, L * C)

    def collect_gradients(self) -> None:
        """Get ready for `block_pull_back` of every block, and for gradients in every join."""
        self._dscores = torch.empty_like(self._scores)
        for join in self._inner:
            join.dq, join.dk = torch.empty_like(join.q), torch.empty_like(join.k)

    def block_pull_back(self, first: int, last: int, grad: Tensor) -> None:
        """Take in the gradient of `block_scores(first, last)`, zero above the diagonal."""
        L, C = self.layout.L, self.layout.C
        n, b, rows, _ = grad.shape
        grad = grad.view(n, b, L, rows // L, L, C)
        dscores = self._blocks(self._dscores)[:, first:last]
        for leaf in range(L):
            dscores[:, :, leaf] = grad[:, :, leaf, :, leaf]
        for join in self._inner:
            assert join.dq is not None
            assert join.dk is not None
            pieces = [
                grad[:, :, right, :, left].flatten(4).flatten(2, 3) for right, left in _pairs_of_a_block(L, join.size)
            ]
            ds = torch.stack(pieces, 2)
            self._per_block(join.dq)[:, first:last] = ds @ self._per_block(join.k)[:, first:last]
            self._per_block(join.dk)[:, first:last] = ds.mT @ self._per_block(join.q)[:, first:last]

    def pull_back(self, droot_rows: Tensor | None) -> LeafGradients:
        """Gradients of the inputs, each [n, leaves, …], once every block and join has got its own."""
        n = self._scores.shape[0]
        like = (self.rows, self._k.unflatten(0, (n, -1)))
        dq, dk, dproduct = descend([*self._inner, *self.joins], *like, droot_rows)
        grads = Leaves(*(x.flatten(0, 1) for x in (self._dscores, dq, dk, dproduct)))
        made = leaves_backward(grads, self._q, self._k, self._w, self._beta, self._saved)
        return LeafGradients(*(x.unflatten(0, (n, -1)) for x in made))

    def _blocks(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.layout.blocks, self.layout.L))

    def _per_block(self, x: Tensor) -> Tensor:
        """[n, pairs, *] of an inner join -> [n, blocks, pairs of a block, *]."""
        return x.unflatten(1, (self.layout.blocks, -1))


def _pairs_of_a_block(L: int, size: int) -> list[tuple[slice, slice]]:
    """The leaves (right, left) of every pair of nodes of `size` leaves within a block of L."""
    return [(slice(a + size, a + 2 * size), slice(a, a + size)) for a in range(0, L, 2 * size)]
