"""One tree of some heads by Triton kernels: read-out, solve, and their gradients.

All tensors are float32 with padded head sizes D' and E'; a past has whole leaves.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..keys import inverse_norms
from ..triton_tiles import Precisions
from .heads import Outputs, PathHeads, per_leaf, through_the_norm
from .scores import LEAF, Layout, PathScores
from .tiles import BLOCK_LEAVES
from .tree import Join
from .triton_configs import PathTileSizes
from .triton_rectangles import Rectangles, Side, TritonAlgebra


@dataclass(frozen=True)
class Places:
    """Which positions see each other.

    new: [B, at least all leaves], the document of each position, −1 where it takes no part; old: [B, S'], the same of
    the past; documents: [2, as new], where the document of a position starts and ends. None: all see all before them.
    only_past: only the past has positions that take no part.
    """

    new: Tensor | None
    old: Tensor | None
    documents: Tensor | None
    only_past: bool = False

    def rows(self, where: slice) -> "Places":
        """Those of some rows of the batch."""
        return replace(
            self, new=None if self.new is None else self.new[where], old=None if self.old is None else self.old[where]
        )


@dataclass(frozen=True)
class Kernels:
    """What launches kernels for heads that are computed together, `heads` of each row of the batch."""

    tiles: PathTileSizes
    multiply: Precisions
    heads: int
    places: Places

    @property
    def algebra(self) -> TritonAlgebra:
        return TritonAlgebra(self.tiles.product, self.multiply.keys)

    @property
    def readout(self) -> Rectangles:
        """Scores of a read-out need no more than its products with values."""
        return Rectangles(self.tiles, replace(self.multiply, keys=self.multiply.values), self.heads)

    @property
    def solve(self) -> Rectangles:
        return Rectangles(self.tiles, self.multiply, self.heads)


class _Tree:
    """The scores of all sets of rows: those of q first, those of the solve last."""

    def __init__(self, heads: PathHeads, kernels: Kernels, *, keep: bool) -> None:
        solves = heads.sharpness is not None
        self.heads, self.kernels = heads, kernels
        self.layout = layout = Layout.of_whole_leaves(heads.k.shape[1], BLOCK_LEAVES if solves else 1)
        self.k, w, beta = (layout.cut(x) for x in (heads.k, heads.w, heads.beta))
        self.groups = 0 if heads.q is None else heads.q.shape[1]
        rows = [] if heads.q is None else [layout.cut_rows(heads.q)]
        if heads.sharpness is not None:
            self.inverse = inverse_norms(self.k)
            rows.append(self.k * self.inverse.mul(per_leaf(heads.sharpness)))
        past = heads.k_past is not None
        self.scores = PathScores(
            layout, rows, self.k, w, beta, to_the_root=past, keep=keep or solves, algebra=kernels.algebra
        )
        self.last = len(rows) - 1

    def sides(self, join: Join, which: int, keys: Tensor | None = None) -> tuple[Side, Side]:
        """Rows and keys of a join."""
        places, step = self.kernels.places, 2 * join.size * LEAF
        ids = None if places.only_past else places.new
        starts, ends = (None, None) if places.documents is None else places.documents
        right, left = (join.first + join.size) * LEAF, join.first * LEAF
        keys = join.k if keys is None else keys
        return Side(join.rows[which], ids, right, step, starts), Side(keys, ids, left, step, ends)

    def past_sides(self, which: int, keys: Tensor) -> tuple[Side, Side]:
        """All rows, at the root, and keys of the past [n, S', D']."""
        rows = self.scores.rows[which].flatten(1, 2)[:, None]
        return Side(rows, self.kernels.places.new), Side(keys[:, None], self.kernels.places.old)

    def hidden(self, size: int) -> Tensor:
        """Which positions are not seen within blocks of `size` leaves: [1 or B, 1, blocks, size·C, size·C]."""
        C, device = size * LEAF, self.k.device
        future = torch.ones(C, C, dtype=torch.bool, device=device).triu(1)[None, None, None]
        ids = self.kernels.places.new
        if ids is None or self.kernels.places.only_past:
            return future
        ids = ids[:, None, : self.layout.leaves * LEAF].unflatten(2, (-1, C))
        other = (ids[..., :, None] != ids[..., None, :]) | (ids < 0)[..., None, :]
        own = torch.eye(C, dtype=torch.bool, device=device)
        # A position always sees itself, also if it takes no part: nothing is divided by zero.
        return future | (other & ~own)

    def per_row(self, x: Tensor) -> Tensor:
        """[n, *] -> [B, H, *]."""
        return x.unflatten(0, (-1, self.kernels.heads))


def forward_heads(heads: PathHeads, kernels: Kernels) -> Outputs:
    tree = _Tree(heads, kernels, keep=False)
    layout = tree.layout
    values = layout.cut(heads.v).clone()
    if heads.sharpness is not None:
        Solve(tree).run_(values)
    y = layout.join(values) if heads.sharpness is not None else None
    if heads.q is None:
        return Outputs(None, None, y)
    o, lse = _attend(tree, values)
    return Outputs(layout.join_rows(o), layout.join_rows(lse[..., None])[..., 0], y)


def _attend(tree: _Tree, y: Tensor) -> tuple[Tensor, Tensor]:
    """o: [n, leaves, G·C, E'] and lse: [n, leaves, G·C]."""
    p, kernels, G = _leaf_scores(tree), tree.kernels, tree.groups
    lse = p.logsumexp(-1)
    o = kernels.algebra.product(p.sub_(lse[..., None]).exp_(), y)
    for join in tree.scores.all_joins():
        rows, keys = tree.sides(join, 0)
        kernels.readout.attend_(rows, keys, G, join.left_of(y), join.right_of(o), join.right_of(lse))
    if tree.heads.k_past is not None and tree.heads.y_past is not None:
        rows, keys = tree.past_sides(0, tree.heads.k_past)
        kernels.readout.attend_(rows, keys, G, tree.heads.y_past[:, None], _one(o), _one(lse))
    return o, lse


def _one(x: Tensor) -> Tensor:
    """All rows as those of one node: [n, leaves, R, *] -> [n, 1, leaves · R, *]."""
    return x.flatten(1, 2)[:, None]


def _leaf_scores(tree: _Tree) -> Tensor:
    """[n, leaves, G·C, C], −∞ where a position is not seen."""
    scores = tree.scores.leaf_scores(0).unflatten(2, (tree.groups, LEAF))
    hidden = tree.hidden(1)[:, :, :, None]
    return tree.per_row(scores).masked_fill(hidden, -math.inf).flatten(0, 1).flatten(2, 3)


def _attend_backward(
    tree: _Tree, y: Tensor, do: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """dy: [n, leaves, C, E'], and the gradients of k_past and y_past."""
    scores, algebra, readout, G = tree.scores, tree.kernels.algebra, tree.kernels.readout, tree.groups
    p = _leaf_scores(tree).sub_(lse[..., None]).exp_()
    along = (do * o).sum(-1)
    dy = algebra.product(p.mT, do)
    scores.leaf_pull_back(0, p.mul_(algebra.product(do, y.mT).sub_(along[..., None])))

    def rectangle(sides: tuple[Side, Side], *of_rows: Tensor, y: Tensor, drows: Tensor, dkeys: Tensor, dy: Tensor):  # type: ignore[no-untyped-def]
        (rows, keys), (do, lse, along) = sides, of_rows
        readout.pull_(rows, keys, G, lse, along, do, y, drows, 1.0, to_rows=True)
        readout.pull_(keys, rows, G, lse, along, y, do, dkeys, 1.0, to_rows=False)
        readout.apply_(keys, rows, G, lse, do, dy, 1.0, to_rows=False)

    for join in scores.all_joins():
        assert join.dk is not None
        join.drows[0].zero_()
        of_rows = (join.right_of(x) for x in (do, lse, along))
        rectangle(
            tree.sides(join, 0), *of_rows, y=join.left_of(y), drows=join.drows[0], dkeys=join.dk, dy=join.left_of(dy)
        )
    k_past, y_past = tree.heads.k_past, tree.heads.y_past
    if k_past is None or y_past is None:
        return dy, None
    dk_past, dy_past = torch.zeros_like(k_past), torch.zeros_like(y_past)
    of_rows = (_one(x) for x in (do, lse, along))
    rectangle(
        tree.past_sides(0, k_past), *of_rows, y=y_past[:, None], drows=_one(scores.drows[0]), dkeys=dk_past[:, None],
        dy=dy_past[:, None],
    )  # fmt: skip
    return dy, (dk_past, dy_past)


class Solve:
    """Y = P⁻¹ V on the last set of rows of a tree: blocks of 256 positions are inverted all at once; once a block is
    solved, the one rectangle that is due then is subtracted from the rows behind it."""

    def __init__(self, tree: _Tree) -> None:
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
                rows, keys, 1, self._shifts(rows), tree.heads.y_past[:, None], _one(y), -1.0, to_rows=True
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
        """The rectangle that is due once a block is solved: rows, keys, and the parts of x on the left and the right."""
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
        scores, rectangles = tree.scores, tree.kernels.solve
        sums = []
        dinverse = self._blocks_pull_back(y, g, sums if learned else None)

        def rectangle(sides, g, y, drows, dkeys):  # type: ignore[no-untyped-def]
            rows, keys = sides
            shifts, total = self._shifts(rows), rows.x.new_empty(rows.x.shape[:3]) if learned else None
            rectangles.pull_(rows, keys, 1, shifts, None, g, y, drows, -1.0, to_rows=True, sums=total)
            rectangles.pull_(keys, rows, 1, shifts, None, y, g, dkeys, -1.0, to_rows=False)
            if total is not None:
                sums.append(total.sum((1, 2)))

        for join, keys in zip(self.joins, self.keys, strict=True):
            assert join.dk is not None
            dkeys = torch.zeros_like(keys)
            join.drows[which].zero_()
            rectangle(tree.sides(join, which, keys), join.right_of(g), join.left_of(y), join.drows[which], dkeys)
            join.left_of(dinverse).add_((dkeys * join.k).sum(-1, keepdim=True))
            join.dk += dkeys.mul_(join.left_of(tree.inverse))
        du_past = None
        if self.past is not None and tree.heads.y_past is not None and dy_past is not None:
            du_past = torch.zeros_like(self.past)
            sides = tree.past_sides(which, self.past)
            y_past = tree.heads.y_past[:, None]
            rectangle(sides, _one(g), y_past, _one(scores.drows[which]), du_past[:, None])
            rows, keys = sides
            rectangles.apply_(keys, rows, 1, self._shifts(rows), _one(g), dy_past[:, None], -1.0, to_rows=False)
        return SolveGradients(dinverse, du_past, torch.stack(sums).sum(0)[:, None, None] if learned else None)

    def _blocks_pull_back(self, y: Tensor, g: Tensor, sums: list[Tensor] | None) -> Tensor:
        """Gradients of the scores inside blocks; those of 1/‖k‖ are returned: [n, leaves, C, 1]."""
        tree, layout = self.tree, self.tree.layout
        per_block = [x.unflatten(1, (layout.blocks, layout.L)).flatten(2, 3) for x in (g, y)]
        grads = tree.kernels.algebra.product(per_block[0], per_block[1].mT).mul_(self.matrix).neg_()
        if sums is not None:
            sums.append(grads.sum((1, 2, 3)))
        dinverse = (grads * self.raw).sum(2).view(tree.inverse.shape)
        tree.scores.block_pull_back(tree.last, 0, layout.blocks, grads.mul_(self.columns))
        return dinverse


@dataclass(frozen=True)
class SolveGradients:
    """inverse: [n, leaves, C, 1], of 1/‖k‖; past: [n, S', D'], of k/‖k‖ of the past; row_sums: [n, 1, 1], the sum of the
    gradients of all scores."""

    inverse: Tensor
    past: Tensor | None
    row_sums: Tensor | None


def backward_heads(
    heads: PathHeads, kernels: Kernels, made: Outputs, do: Tensor | None, dy: Tensor | None
) -> PathHeads:
    """Gradients of the heads; of the sharpness [n], if it is a tensor. do, dy: those of o and y, do if there is a q."""
    tree = _Tree(heads, kernels, keep=True)
    layout, scores = tree.layout, tree.scores
    scores.collect_gradients()
    g = torch.zeros_like(layout.cut(heads.v)) if dy is None else layout.cut(dy).clone()
    values = layout.cut(heads.v if made.y is None else made.y).contiguous()
    dk_past = dy_past = dinverse_norms = dsharpness = None
    if do is not None and made.o is not None and made.lse is not None:
        rows = (layout.cut_rows(x).contiguous() for x in (do, made.o, made.lse[..., None]))
        do, o, lse = rows
        dvalues, dpast = _attend_backward(tree, values, do, o, lse[..., 0].contiguous())
        g += dvalues
        dk_past, dy_past = (None, None) if dpast is None else dpast
    found = None
    if heads.sharpness is not None:
        solve = Solve(tree)
        solve.run_adjoint_(g)
        if dy_past is None and heads.y_past is not None:
            dy_past = torch.zeros_like(heads.y_past)
        found = solve.pull_back(values, g, dy_past, isinstance(heads.sharpness, Tensor))
    drows, dk, dw, dbeta = scores.pull_back()
    if found is not None and heads.sharpness is not None:
        dsharpness = through_the_norm(
            heads.sharpness, tree.k, tree.inverse, drows[tree.last], found.inverse, found.row_sums, dk
        )
        if found.past is not None and heads.k_past is not None and heads.inverse_norms is not None:
            dinverse_norms = (found.past * heads.k_past).sum(-1, keepdim=True)
            dk_past = found.past.mul_(heads.inverse_norms).add_(0 if dk_past is None else dk_past)
    dq = None if heads.q is None else layout.join_rows(drows[0])
    dk, dw, dbeta, dv = (layout.join(x) for x in (dk, dw, dbeta, g))
    return PathHeads(dq, dk, dv, dw, dbeta, dk_past, dy_past, dinverse_norms, dsharpness)
