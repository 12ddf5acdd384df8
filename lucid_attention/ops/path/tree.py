"""PaTH scores as a binary tree of plain matrix products.

The score of a query i for a key j ≤ i passes the Householder factors of all positions between them:

    A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j,     H_s = I − β_s w_s w_sᵀ

1. **Leaves.** The sequence is cut into leaves of 64 positions. Inside a leaf, A has a closed form (`key_side`,
   `row_side`), and so have the rows moved to the start of the leaf, q_iᵀ H_i … H_first, the keys moved to its end,
   H_last … H_{j+1} k_j, and the product M = H_last … H_first.
2. **Joins.** A node is a run of leaves: rows are moved to its start, keys to its end. The scores of a right node b
   for its left neighbour a are then one plain product, the rectangle q_b k_aᵀ. One level up (`climb`):

       q_b ← q_b M_a        k_a ← k_a M_bᵀ        M_ab = M_b M_a

   That is O(T D²) for each of the log T levels, with contractions only. A last node that is not complete is only ever
   a right one: its keys and its product are never needed.
3. **Gradients** of leaves and rectangles go down the same tree (`descend`) and through the closed form to q, k, w, β.

`PathScores` is the three together. Rows are G sets of queries for each key/value head, or the keys themselves in
LUCID's system; any number of sets may meet one set of keys. `docs/path.md` has the derivation.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triangular import TORCH, Algebra

# Positions of a leaf.
LEAF = 64
# From nodes of this many positions on, products of contractions contain denormal numbers, which slow down matrix
# products on a CPU by an order of magnitude. Entries below eps² of the largest become zero: no accuracy is lost.
CUT_FROM = 512


@dataclass(frozen=True)
class Layout:
    """T positions as `leaves` leaves of C, padded with zeros at the end; L leaves make a block.

    The scores of a block are one dense matrix. Joins of larger nodes are rectangles.
    """

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
        """Leaves and blocks of one size for every T, as kernels need them."""
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
        """[n, G, T, *] -> [n, leaves, G · C, *]: the G sets of a leaf are contiguous."""
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
    keep: joins stay valid, as gradients need them; otherwise they are views, valid for one pass over `joins`.
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

    def all_joins(self) -> Iterable["Join"]:
        return chain(self.inner, self.joins)

    def leaf_scores(self, which: int) -> Tensor:
        """Scores inside leaves: [n, leaves, G·C, C], lower triangular."""
        return self._heads(self._sides[which].scores)

    def block_scores(self, which: int, first: int, last: int) -> Tensor:
        """Scores inside blocks [first, last): [n, blocks, L·G·C, L·C]. Entries above the diagonal are arbitrary."""
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
        """Allocate gradients: those of leaves and rows of joins must be written, those of keys are added to."""
        self._dscores = [torch.empty_like(side.scores) for side in self._sides]
        self.drows = [torch.zeros_like(rows) for rows in self.rows]
        for join in self.all_joins():
            join.drows, join.dk = [torch.empty_like(x) for x in join.rows], torch.zeros_like(join.k)

    def leaf_pull_back(self, which: int, grad: Tensor) -> None:
        """Set the gradient of `leaf_scores`; grad is zero above the diagonal."""
        self._dscores[which] = grad.flatten(0, 1)

    def block_pull_back(self, which: int, first: int, last: int, grad: Tensor) -> None:
        """Set the gradient of `block_scores`; grad is zero above the diagonal."""
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
        """Gradients of the sets of rows, k, w and beta from those of leaves, joins and root."""
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
        grads = key_side_backward(
            dk.flatten(0, 1), dproduct.flatten(0, 1), self._k, self._w, self._beta, self._keys, into, self._algebra
        )
        dk, dw, dbeta = (self._heads(x) for x in grads)
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


@dataclass
class Join:
    """Pairs of neighbours of one level: nodes of `size` leaves, in leaves [first, last).

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
    """Yield all joins from the leaves up, each before its nodes move up. rows and k are moved in place.

    rows: sets of [n, leaves, R, D]; k: [n, leaves, C, D]; product: [n, leaves, D, D], of the leaves; contiguous.
    keep_below: joins of nodes of fewer leaves hold copies; the others hold views, valid until the next join.
    to_the_root: move the last level as well, so that all rows end at the start of the sequence.
    """
    leaves, C, size = k.shape[1], k.shape[2], 1
    floors = [_floor(x, leaves * C) for x in (*rows, k, product)]
    while size < leaves:
        pairs, positions, moves = leaves // (2 * size), 2 * size * C, to_the_root or 2 * size < leaves
        complete = 2 * size * pairs
        left, right = product[:, : 2 * pairs : 2], product[:, 1 : 2 * pairs : 2]
        joins = [Join(0, pairs, size, complete, rows, k, left, right)] if pairs else []
        if leaves - complete > size:
            alone = product[:, 2 * pairs : 2 * pairs + 1]
            joins.append(Join(complete, 1, size, leaves, rows, k, alone, None))
        for join in joins:
            node_rows, node_keys = [join.right_of(x) for x in rows], join.left_of(k)
            join.rows, join.k = node_rows, node_keys
            if size < keep_below:
                join.rows, join.k = [x.clone() for x in node_rows], node_keys.clone()
            yield join
            if moves:
                for out, before, floor in zip(node_rows, join.rows, floors, strict=False):
                    _write(algebra.product(before, join.left), floor, positions, out=out)
                if join.right is not None:
                    _write(algebra.product(join.k, join.right.mT), floors[len(rows)], positions, out=node_keys)
        above = product.new_empty(product.shape[0], pairs, *product.shape[2:])
        if pairs and moves:
            _write(algebra.product(right, left), floors[-1], positions, out=above)
        product, size = above, 2 * size


def descend(
    joins: list[Join], drows: list[Tensor], dk: Tensor, *, from_the_root: bool, algebra: Algebra = TORCH
) -> Tensor:
    """The adjoint of `climb`: move gradients of rows and keys from the root to the leaves in place.

    joins: in the order of `climb`, each with its drows and dk. drows: sets of [n, leaves, R, D], of the rows at the
    root if from_the_root, otherwise zero; dk: [n, leaves, C, D], zero. Returns the gradient of the products of leaves.
    """
    n, leaves, _, D = dk.shape
    sizes = sorted({join.size for join in joins}, reverse=True)
    above = dk.new_zeros(n, leaves // (2 * sizes[0]) if sizes else leaves, D, D)
    for size in sizes:
        here = dk.new_zeros(n, leaves // size, D, D)
        for join in joins:
            if join.size == size:
                _move_down(join, drows, dk, above, here, algebra, moved=from_the_root or 2 * size < leaves)
        above = here
    return above


def _move_down(
    join: Join, drows: list[Tensor], dk: Tensor, above: Tensor, here: Tensor, algebra: Algebra, *, moved: bool
) -> None:
    """Move the gradients of one join down a level. above, here: gradients of the products of both levels."""
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


# The closed form of a leaf of C positions, batched over all m leaves of some heads. With row vectors for tokens:
#
#     [E, F] = (I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ],     X = tril Q Wᵀ
#     scores  = tril Q Kᵀ − X F
#     moved rows = Q − X E,    moved keys = K − Fᵀ W,    product M = I − Wᵀ E
#
# No H is inverted: it is singular at β = 1, and β = 0 is an ordinary value.


class KeySide(NamedTuple):
    """k: [m, C, D], moved; product: [m, D, D]; for rows and the backward,

    overlap: [m, C, C] = W Wᵀ; rhs, solved: [m, C, D + C] = [W, stril W Kᵀ] and [E, F].
    """

    k: Tensor
    product: Tensor
    overlap: Tensor
    rhs: Tensor
    solved: Tensor


class RowSide(NamedTuple):
    """scores: [m, G·C, C], lower triangular; rows: [m, G·C, D], moved; x: [m, G·C, C], for the backward."""

    scores: Tensor
    rows: Tensor
    x: Tensor


def key_side(k: Tensor, w: Tensor, beta: Tensor, algebra: Algebra = TORCH) -> KeySide:
    """k, w: [m, C, D]; beta: [m, C, 1]."""
    (m, C, D) = k.shape
    overlap = algebra.product(w, w.mT)
    rhs = k.new_empty(m, C, D + C)
    rhs[..., :D] = w
    rhs[..., D:] = algebra.product(w, k.mT).tril_(-1)
    solved = rhs * beta
    algebra.solve_(overlap * beta, solved)
    E, F = solved[..., :D], solved[..., D:]
    product = algebra.plus_product(torch.eye(D, dtype=k.dtype, device=k.device), w.mT, E, alpha=-1)
    return KeySide(algebra.plus_product(k, F.mT, w, alpha=-1), product, overlap, rhs, solved)


def row_side(q: Tensor, k: Tensor, w: Tensor, keys: KeySide, algebra: Algebra = TORCH) -> RowSide:
    """q: [m, G·C, D], G sets of the C rows."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    x = _tril_(algebra.product(q, w.mT))
    scores = algebra.add_product_(_tril_(algebra.product(q, k.mT)), x, F, alpha=-1)
    return RowSide(scores, algebra.plus_product(q, x, E, alpha=-1), x)


def _tril_(x: Tensor) -> Tensor:
    """The lower triangle of each of the G square pieces of x: [m, G·C, C]."""
    return x.view(x.shape[0], -1, x.shape[2], x.shape[2]).tril_().view(x.shape)


class KeySideGradients:
    """Gradients of k, w, E and F, to which every set of rows adds its part."""

    def __init__(self, k: Tensor) -> None:
        m, C, _ = k.shape
        self.k, self.w, self.E = (torch.zeros_like(k) for _ in range(3))
        self.F = k.new_zeros(m, C, C)


def row_side_backward(
    dscores: Tensor,
    drows: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    keys: KeySide,
    x: Tensor,
    into: KeySideGradients,
    algebra: Algebra = TORCH,
) -> Tensor:
    """dq: [m, G·C, D], from the gradients of scores (lower triangular) and moved rows."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    dx = _tril_(algebra.add_product_(algebra.product(drows, E.mT), dscores, F.mT, beta=-1, alpha=-1))
    algebra.add_product_(into.E, x.mT, drows, alpha=-1)
    algebra.add_product_(into.F, x.mT, dscores, alpha=-1)
    algebra.add_product_(into.w, dx.mT, q)
    algebra.add_product_(into.k, dscores.mT, q)
    return algebra.add_product_(algebra.plus_product(drows, dx, w), dscores, k)


def key_side_backward(
    dk: Tensor,
    dproduct: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    keys: KeySide,
    into: KeySideGradients,
    algebra: Algebra = TORCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dw: [m, C, D] and dbeta: [m, C, 1], from those of moved keys, products and all rows. Overwrites `keys`."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    dw = algebra.add_product_(algebra.add_product_(into.w, E, dproduct.mT, alpha=-1), F, dk, alpha=-1)
    algebra.add_product_(into.E, w, dproduct, alpha=-1)
    algebra.add_product_(into.F, w, dk.mT, alpha=-1)
    dk = into.k.add_(dk)

    dsolved = torch.cat([into.E, into.F], -1)
    algebra.solve_transposed_(keys.overlap * beta, dsolved)
    # Gradients of diag(β) [W, stril W Kᵀ] and of −diag(β) stril W Wᵀ, in this order.
    dsystem = algebra.product(dsolved, keys.solved.mT).tril_(-1)
    dbeta = keys.rhs.mul_(dsolved).sum(-1, keepdim=True)
    dbeta -= keys.overlap.mul_(dsystem).sum(-1, keepdim=True)
    dsolved.mul_(beta)
    dsystem.mul_(beta)
    dw += dsolved[..., :D]
    dcross = dsolved[..., D:].tril(-1)
    algebra.add_product_(dw, dcross, k)
    algebra.add_product_(dw, dsystem, w, alpha=-1)
    algebra.add_product_(dw, dsystem.mT, w, alpha=-1)
    algebra.add_product_(dk, dcross.mT, w)
    return dk, dw, dbeta
