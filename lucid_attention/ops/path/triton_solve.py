"""LUCID's triangular system on PaTH scores by Triton kernels."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .triton_rectangles import Side
from .triton_tree import TritonTree, one_node


@dataclass(frozen=True)
class SolveGradients:
    """inverse: [n, leaves, C, 1], of 1/‖k‖; past: [n, S', D'], of k/‖k‖ of the past; row_sums: [n, 1, 1], the sum of
    the gradients of all scores, for a learned sharpness."""

    inverse: Tensor
    past: Tensor | None
    row_sums: Tensor | None


class Solve:
    """Y = P⁻¹ V on the last set of rows of a tree: blocks of 256 positions are inverted all at once; once a block is
    solved, the one rectangle that is due then is subtracted from the rows behind it."""

    def __init__(self, tree: TritonTree) -> None:
        heads, layout, self.tree = tree.heads, tree.layout, tree
        assert heads.sharpness is not None
        n, c = heads.k.shape[0], heads.sharpness
        self.c = c.reshape(n) if isinstance(c, Tensor) else heads.k.new_full((n,), c)
        # A factor of the columns of blocks.
        self.columns = tree.inverse.flatten(1, 2).unflatten(1, (layout.blocks, -1)).mT
        self.raw = tree.scores.block_scores(tree.last, 0, layout.blocks)
        exponents = tree.per_row(self.raw * self.columns - self.c[:, None, None, None])
        hidden = tree.hidden(layout.L).clone()
        hidden |= torch.eye(layout.block, dtype=torch.bool, device=hidden.device)
        self.matrix = exponents.masked_fill(hidden, -math.inf).exp_().flatten(0, 1)
        self.inverse = tree.kernels.algebra.inverse(self.matrix.flatten(0, 1)).unflatten(0, (n, -1))
        self.joins = list(tree.scores.joins)
        self.keys = [join.k * join.left_of(tree.inverse) for join in self.joins]
        self.due = {
            (join.first + 2 * pair * join.size, join.size): (join, keys, pair)
            for join, keys in zip(self.joins, self.keys, strict=True)
            for pair in range(join.pairs)
        }
        self.past = None
        if heads.k_past is not None and heads.inverse_norms is not None:
            self.past = heads.k_past * heads.inverse_norms

    def run_(self, y: Tensor) -> None:
        """V -> Y in place: [n, leaves, C, E']."""
        tree, blocks = self.tree, self.tree.layout.blocks
        rectangles, algebra = tree.kernels.solve, tree.kernels.algebra
        if self.past is not None and tree.heads.y_past is not None:
            rows, keys = tree.past_sides(tree.last, self.past)
            rectangles.apply_(
                rows, keys, 1, self._shifts(rows), tree.heads.y_past[:, None], one_node(y), -1.0, to_rows=True
            )
        for block in range(blocks):
            here = self._block(y, block)
            here.copy_(algebra.product(self.inverse[:, block], here))
            for rows, keys, left, right in self._due(block, y):
                rectangles.apply_(rows, keys, 1, self._shifts(rows), left, right, -1.0, to_rows=True)

    def run_adjoint_(self, g: Tensor) -> None:
        """dY -> dV in place."""
        tree = self.tree
        for block in reversed(range(tree.layout.blocks)):
            for rows, keys, left, right in self._due(block, g):
                tree.kernels.solve.apply_(keys, rows, 1, self._shifts(rows), right, left, -1.0, to_rows=False)
            here = self._block(g, block)
            here.copy_(tree.kernels.algebra.product(self.inverse[:, block].mT, here))

    def _block(self, x: Tensor, block: int) -> Tensor:
        """[n, leaves, C, E'] -> [n, L·C, E'], a view."""
        L = self.tree.layout.L
        return x[:, block * L : (block + 1) * L].flatten(1, 2)

    def _due(self, block: int, x: Tensor) -> list[tuple[Side, Side, Tensor, Tensor]]:
        """The rectangle that is due once a block is solved: rows, keys, and what x has on the left and the right."""
        L = self.tree.layout.L
        node = ((block + 1) & -(block + 1)) * L
        found = self.due.get(((block + 1) * L - node, node))
        if found is None:
            return []
        join, keys, pair = found
        sides = self.tree.sides(join, self.tree.last, keys)
        rows, columns = (side.pair(pair) for side in sides)
        return [(rows, columns, join.left_of(x)[:, pair : pair + 1], join.right_of(x)[:, pair : pair + 1])]

    def _shifts(self, rows: Side) -> Tensor:
        return self.c[:, None, None].expand(rows.x.shape[:3])

    def pull_back(self, y: Tensor, g: Tensor, dy_past: Tensor | None, learned: bool) -> "SolveGradients":
        """Gradients of scores go to the tree's; dy_past: [n, S', E'], added to."""
        tree, which = self.tree, self.tree.last
        sums: list[Tensor] = []
        dinverse = self._blocks_pull_back(y, g, sums)
        for join, keys in zip(self.joins, self.keys, strict=True):
            assert join.dk is not None
            dkeys = torch.zeros_like(keys)
            join.drows[which].zero_()
            of_values = join.right_of(g), join.left_of(y)
            sums += self._pull_back(tree.sides(join, which, keys), *of_values, join.drows[which], dkeys, learned)
            join.left_of(dinverse).add_((dkeys * join.k).sum(-1, keepdim=True))
            join.dk += dkeys.mul_(join.left_of(tree.inverse))
        du_past = None
        if self.past is not None and tree.heads.y_past is not None and dy_past is not None:
            du_past = torch.zeros_like(self.past)
            rows, keys_side = sides = tree.past_sides(which, self.past)
            drows = one_node(tree.scores.drows[which])
            sums += self._pull_back(sides, one_node(g), tree.heads.y_past[:, None], drows, du_past[:, None], learned)
            tree.kernels.solve.apply_(
                keys_side, rows, 1, self._shifts(rows), one_node(g), dy_past[:, None], -1.0, to_rows=False
            )
        return SolveGradients(dinverse, du_past, torch.stack(sums).sum(0)[:, None, None] if learned else None)

    def _pull_back(
        self, sides: tuple[Side, Side], g: Tensor, y: Tensor, drows: Tensor, dkeys: Tensor, learned: bool
    ) -> list[Tensor]:
        """Add the gradients of rectangles to drows: [n, pairs, R, D'] and dkeys: [n, pairs, K, D'].

        Returns, for a learned sharpness, the sum of the gradients of all scores: [n].
        """
        (rows, keys), rectangles, shifts = sides, self.tree.kernels.solve, self._shifts(sides[0])
        sums = rows.x.new_empty(rows.x.shape[:3]) if learned else None
        rectangles.pull_(rows, keys, 1, shifts, None, g, y, drows, -1.0, to_rows=True, sums=sums)
        rectangles.pull_(keys, rows, 1, shifts, None, y, g, dkeys, -1.0, to_rows=False)
        return [] if sums is None else [sums.sum((1, 2))]

    def _blocks_pull_back(self, y: Tensor, g: Tensor, sums: list[Tensor]) -> Tensor:
        """Gradients of the scores inside blocks; those of 1/‖k‖ are returned: [n, leaves, C, 1]. Adds to `sums`."""
        tree, layout = self.tree, self.tree.layout
        per_block = [x.unflatten(1, (layout.blocks, layout.L)).flatten(2, 3) for x in (g, y)]
        grads = tree.kernels.algebra.product(per_block[0], per_block[1].mT).mul_(self.matrix).neg_()
        sums.append(grads.sum((1, 2, 3)))
        dinverse = (grads * self.raw).sum(2).view(tree.inverse.shape)
        tree.scores.block_pull_back(tree.last, 0, layout.blocks, grads.mul_(self.columns))
        return dinverse
