"""PaTH, LUCID's solve on PaTH scores, or both on one tree: sequence by sequence, some heads at a time.

Top-down: `forward` and `backward` go over parts of the batch and groups of heads; `forward_heads` and `backward_heads`
solve and read one group on one tree (`tree.py`):

- the read-out is dense inside leaves and one non-causal attention for each join of the tree; rows merge these partial
  softmaxes by their log-sum-exps, and with the final output and log-sum-exp the gradient of each part is exact;
- the solve (`BlockwiseTree`) is that of `triangular.py` in the order of the tree: once a diagonal block is solved, the
  one rectangle that is due is a product of moved rows and keys (`PathTiles`).

Memory is linear in the length: a tree exists only for the heads in flight. `triton_pass.py` solves with kernels.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import packing
from ..keys import inverse_norms
from ..precision import no_autocast
from ..softmax.strips import attend_rectangle, attend_rectangle_backward
from ..triangular import (
    FOLDED_SHIFT,
    LOG2E,
    TORCH,
    Algebra,
    ExponentialTiles,
    Schedule,
    pick_schedule,
    solve_,
    solve_adjoint_,
)
from .system import DIFFERENTIABLE, PathSystem
from .tree import Join, Layout, PathScores

# Heads of short sequences run together, up to this many positions: many small steps would cost more than their work.
POSITIONS = 2048
# Leaves of a diagonal block of a solve: as large as the blocks of plain LUCID.
BLOCK_LEAVES = 4
# Diagonal blocks whose scores are made, and pulled back, in one batch.
BLOCKS_AT_ONCE = 4

Group = tuple[slice, slice]
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


@dataclass(frozen=True)
class PathHeads:
    """n heads of a `PathSystem` in working precision.

    q: [n, G, T, D], scaled, None without a read-out; k, w: [n, T, D]; v: [n, T, E]; beta: [n, T, 1]; of a past k_past:
    [n, S, D], y_past: [n, S, E], inverse_norms: [n, S, 1]; sharpness: None without a solve, a number, or [n, 1, 1].

    As gradients: each in the place of its input, beta: [n, T], inverse_norms: [n, S], sharpness: [n].
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None
    y_past: Tensor | None
    inverse_norms: Tensor | None
    sharpness: float | Tensor | None

    @property
    def past(self) -> tuple[Tensor, Tensor] | None:
        """k_past and y_past."""
        return None if self.k_past is None or self.y_past is None else (self.k_past, self.y_past)

    @property
    def u_past(self) -> Tensor | None:
        """k/‖k‖ of the past, moved to its end: [n, S, D]."""
        return None if self.k_past is None or self.inverse_norms is None else self.k_past * self.inverse_norms


class Outputs(NamedTuple):
    """o: [n, G, T, E] and lse: [n, G, T] with a read-out; y: [n, T, E] with a solve."""

    o: Tensor | None
    lse: Tensor | None
    y: Tensor | None


class SolveGradients(NamedTuple):
    """v: [n, T, E]; inverse: [n, leaves, C, 1], of 1/‖k‖; u_past: [n, S, D], of k/‖k‖ of the past.

    row_sums: [n, *, 1], sums of the gradients of the scores of a row, for a learned sharpness.
    """

    v: Tensor
    inverse: Tensor
    u_past: Tensor | None
    row_sums: Tensor | None


class HeadsTree:
    """The PaTH scores of some heads. Sets of rows: those of q first, those of the solve, c k/‖k‖, last.

    Subclasses solve. Tensors are those of `PathHeads` and `Outputs`; their head sizes may be padded.
    """

    def __init__(self, heads: PathHeads, layout: Layout, *, keep: bool, algebra: Algebra = TORCH) -> None:
        self.heads, self.layout, self.algebra = heads, layout, algebra
        self.k, w, beta = (layout.cut(x) for x in (heads.k, heads.w, heads.beta))
        rows = [] if heads.q is None else [layout.cut_rows(heads.q)]
        if heads.sharpness is not None:
            self.inverse = inverse_norms(self.k)
            rows.append(self.k * self.inverse.mul(_per_leaf(heads.sharpness)))
            keep = True
        past = heads.k_past is not None
        self.scores = PathScores(layout, rows, self.k, w, beta, to_the_root=past, keep=keep, algebra=algebra)
        self.last = len(rows) - 1

    def solve(self) -> Tensor:
        """Y = P⁻¹ V."""
        raise NotImplementedError

    def solve_backward(self, y: Tensor, dy: Tensor, dy_past: Tensor | None) -> SolveGradients:
        """Gradients of scores go to `scores`; those of y_past are added to dy_past. dy may be overwritten."""
        raise NotImplementedError

    def attend(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """o and lse."""
        scores, layout, y = self.scores, self.layout, self.layout.cut(y)
        p = scores.leaf_scores(0)
        p = p.masked_fill(self._future(p), -math.inf)
        top = p.amax(-1, keepdim=True)
        p.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        o, lse = self.algebra.product(p, y).div_(total), total.log().add_(top)
        for join in scores.all_joins():
            part, part_lse = self.attend_rectangle(join.rows[0], join.k, join.left_of(y))
            _merge_(join.right_of(o), join.right_of(lse), part, part_lse[..., None])
        if self.heads.past is not None:
            k_past, y_past = self.heads.past
            part, part_lse = self.attend_rectangle(one_node(scores.rows[0]), k_past[:, None], y_past[:, None])
            _merge_(one_node(o), one_node(lse), part, part_lse[..., None])
        return layout.join_rows(o), layout.join_rows(lse)[..., 0]

    def attend_backward(
        self, y: Tensor, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """dy and the gradients of k_past and y_past; those of scores go to `scores`."""
        scores, layout, y = self.scores, self.layout, self.layout.cut(y)
        do, o, lse = (layout.cut_rows(x) for x in (do, o, lse[..., None]))
        p = scores.leaf_scores(0).sub(lse).exp_()
        p.masked_fill_(self._future(p), 0)
        dy = self.algebra.product(p.mT, do)
        along = (do * o).sum(-1, keepdim=True)
        scores.leaf_pull_back(0, p.mul_(self.algebra.product(do, y.mT).sub_(along)))
        for join in scores.all_joins():
            assert join.dk is not None
            args = join.right_of(do), join.rows[0], join.k, join.left_of(y), join.right_of(o)
            join.drows[0], dk, dy_left = self.attend_rectangle_backward(*args, join.right_of(lse)[..., 0])
            join.dk += dk
            join.left_of(dy).add_(dy_left)
        if self.heads.past is None:
            return layout.join(dy), None
        k_past, y_past = self.heads.past
        args = one_node(do), one_node(scores.rows[0]), k_past[:, None], y_past[:, None], one_node(o)
        drows, dk_past, dy_past = self.attend_rectangle_backward(*args, one_node(lse)[..., 0])
        scores.drows[0].add_(drows[:, 0].view(scores.rows[0].shape))
        return layout.join(dy), (dk_past[:, 0], dy_past[:, 0])

    def attend_rectangle(self, q: Tensor, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return attend_rectangle(q, k, y)

    def attend_rectangle_backward(
        self, do: Tensor, q: Tensor, k: Tensor, y: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attend_rectangle_backward(do, q, k, y, o, lse)

    def wide(self, x: MaybeTensor) -> MaybeTensor:
        """[*, E] as the tree computes it, E padded."""
        return x

    def _future(self, scores: Tensor) -> Tensor:
        """Which of the scores inside leaves [n, leaves, G·C, C] are above the diagonal: [G·C, C]."""
        position = torch.arange(scores.shape[3], device=scores.device)
        return position > position.repeat(scores.shape[2] // scores.shape[3])[:, None]


# The groups of heads that are computed together, and the tree of a group.
Trees = tuple[Iterable[Group], Callable[[Group], HeadsTree]]
# From a system, one of its parts, and whether the trees stay valid for gradients.
Plan = Callable[[PathSystem, packing.Part, bool], Trees]


def _plan(system: PathSystem, part: packing.Part, keep: bool) -> Trees:
    sequences = system.part(part)
    B, H, T = sequences.k.shape[:3]
    schedule = pick_schedule(system.k.device, B * H, T, sequences.past_length)
    schedule = replace(schedule, heads=max(schedule.heads, min(B * H, POSITIONS // T)))
    layout = Layout.of(T, BLOCK_LEAVES if system.solves else 1)
    return schedule.groups(B, H), lambda group: BlockwiseTree(heads_of(sequences, group), layout, schedule, keep=keep)


def forward(system: PathSystem, plan: Plan = _plan) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """o: [B, H·G, T, E] in the dtype of q and lse: [B, H·G, T], if there is a q; y: [B, H, T, E], if it solves."""
    q, v = system.q, system.v
    o = lse = None
    if q is not None:
        o = system.output(*q.shape[:3], v.shape[3], like=q)
        lse = system.output(*q.shape[:3], like=q, dtype=system.dtype)
    y = system.output(*v.shape, like=v) if system.solves else None
    with no_autocast(v):
        for part, (o_part, lse_part, y_part), _ in packing.pieces(system.parts(), (o, lse, y)):
            groups, tree_of = plan(system, part, False)
            for group in groups:
                outputs = forward_heads(tree_of(group))
                _store(o_part, group, outputs.o, by_kv_head=True)
                _store(lse_part, group, outputs.lse, by_kv_head=True)
                _store(y_part, group, outputs.y)
    return o, lse, y


def backward(
    system: PathSystem,
    outputs: Sequence[Tensor | None],
    do: Tensor | None,
    dy: Tensor | None,
    plan: Plan = _plan,
) -> list[Tensor | None]:
    """Gradients of `DIFFERENTIABLE`. outputs: those of `forward`; do, dy: gradients of o and y."""
    inputs = [x if isinstance(x := getattr(system, name), Tensor) else None for name in DIFFERENTIABLE]
    grads = [None if x is None else system.output(*x.shape, like=x) for x in inputs]
    if system.q is not None and do is None:
        grads[0] = torch.zeros_like(system.q)
        system = replace(system, q=None)
    dsharpness = grads[-1]
    if dsharpness is not None:
        dsharpness.zero_()
    new = [None if do is None else grads[0], *grads[1:5]]
    with no_autocast(system.v):
        for part, new_pieces, past_pieces in packing.pieces(system.parts(), new, grads[5:8]):
            dc = None if dsharpness is None else torch.empty_like(part.per_sequence(dsharpness))
            o, lse, y = (None if x is None else part.take(x) for x in outputs)
            do_part, dy_part = (None if x is None else part.take_grad(x) for x in (do, dy))
            groups, tree_of = plan(system, part, True)
            for group in groups:
                rows = [_flat(x, group, system, by_kv_head=True) for x in (o, lse, do_part)]
                values, dvalues = (_flat(x, group, system) for x in (y, dy_part))
                tree = tree_of(group)
                made = Outputs(tree.wide(rows[0]), rows[1], tree.wide(values))
                found = backward_heads(tree, made, tree.wide(rows[2]), tree.wide(dvalues))
                if found.q is not None:
                    found.q.mul_(system.scale)
                for name, whole in zip(DIFFERENTIABLE, [*new_pieces, *past_pieces, dc], strict=True):
                    _store(whole, group, getattr(found, name), by_kv_head=name == "q")
            if dsharpness is not None and dc is not None:
                part.add_sequences_(dsharpness, dc)
    return grads


def forward_heads(tree: HeadsTree) -> Outputs:
    y = None if tree.heads.sharpness is None else tree.solve()
    if tree.heads.q is None:
        return Outputs(None, None, y)
    return Outputs(*tree.attend(tree.heads.v if y is None else y), y)


def backward_heads(tree: HeadsTree, outputs: Outputs, do: Tensor | None, dy: Tensor | None) -> PathHeads:
    """Gradients of the heads. do: [n, G, T, E], if there is a q, and dy: [n, T, E]: those of o and y."""
    heads, layout, scores = tree.heads, tree.layout, tree.scores
    scores.collect_gradients()
    dv = torch.zeros_like(heads.v) if dy is None else dy.clone()
    dk_past = dy_past = dinverse_norms = dsharpness = solved = None
    if do is not None and outputs.o is not None and outputs.lse is not None:
        values = heads.v if outputs.y is None else outputs.y
        dvalues, dpast = tree.attend_backward(values, do, outputs.o, outputs.lse)
        dv += dvalues
        dk_past, dy_past = (None, None) if dpast is None else dpast
    if outputs.y is not None:
        if dy_past is None and heads.y_past is not None:
            dy_past = torch.zeros_like(heads.y_past)
        solved = tree.solve_backward(outputs.y, dv, dy_past)
        dv = solved.v
    drows, dk, dw, dbeta = scores.pull_back()
    if solved is not None and heads.sharpness is not None:
        dsharpness = _through_the_norm(tree, heads.sharpness, drows[tree.last], solved, dk)
        if solved.u_past is not None and heads.k_past is not None and heads.inverse_norms is not None:
            dinverse_norms = (solved.u_past * heads.k_past).sum(-1)
            dk_past = solved.u_past.mul_(heads.inverse_norms).add_(0 if dk_past is None else dk_past)
    dq = None if heads.q is None else layout.join_rows(drows[0])
    dk, dw, dbeta = (layout.join(x) for x in (dk, dw, dbeta))
    return PathHeads(dq, dk, dv, dw, dbeta[..., 0], dk_past, dy_past, dinverse_norms, dsharpness)


def _through_the_norm(
    tree: HeadsTree, sharpness: float | Tensor, drows: Tensor, solved: SolveGradients, dk: Tensor
) -> Tensor | None:
    """Add to dk the gradients through the rows c k/‖k‖ and the factors 1/‖k‖ of a solve; return that of c: [n].

    drows, dk: [n, leaves, C, D]. solved.inverse is overwritten.
    """
    c, k, inverse = _per_leaf(sharpness), tree.k, tree.inverse
    along = (drows * k).sum(-1, keepdim=True)
    dinverse = solved.inverse.add_(along * c)
    # 1/‖k‖ falls by k/‖k‖³; in this order nothing overflows for very short keys.
    dk.add_(drows * (inverse * c)).sub_(k * inverse * (dinverse * inverse * inverse))
    if solved.row_sums is None:
        return None
    return (along * inverse).sum((1, 2, 3)) - solved.row_sums.sum((1, 2))


def _per_leaf(sharpness: float | Tensor) -> float | Tensor:
    return sharpness[..., None] if isinstance(sharpness, Tensor) else sharpness


def heads_of(system: PathSystem, group: Group) -> PathHeads:
    q = _flat(system.q, group, system, by_kv_head=True)
    c: float | Tensor | None = None
    if system.solves:
        c = system.sharpness
        c = _flat(c, group, system)[:, None, None] if isinstance(c, Tensor) else c
    k_past, y_past, inverse = (_flat(x, group, system) for x in (system.k_past, system.y_past, system.inverse_norms))
    k, v, w, beta = (_flat(x, group, system) for x in (system.k, system.v, system.w, system.beta))
    inverse = None if inverse is None else inverse[..., None]
    return PathHeads(None if q is None else q * system.scale, k, v, w, beta[..., None], k_past, y_past, inverse, c)


def _flat(x: MaybeTensor, group: Group, system: PathSystem, *, by_kv_head: bool = False) -> MaybeTensor:
    """[B, H, *] -> [n, *] or, by_kv_head, [B, H·G, *] -> [n, G, *], in working precision; None for None."""
    if x is None:
        return x
    by_head = x.unflatten(1, (system.k.shape[1], -1)) if by_kv_head else x
    return by_head[group].flatten(0, 1).to(system.dtype)


def _store(out: Tensor | None, group: Group, value: Tensor | None, *, by_kv_head: bool = False) -> None:
    """The inverse of `_flat`, into `out` if it is given. Padding at the end of dimensions of value is dropped."""
    if out is None:
        return
    assert value is not None
    target = (out.unflatten(1, (-1, value.shape[1])) if by_kv_head else out)[group]
    for dim, size in enumerate(target.shape[2:], 1):
        value = value.narrow(dim, 0, size)
    target.copy_(value.unflatten(0, target.shape[:2]))


class BlockwiseTree(HeadsTree):
    """By torch's operations."""

    def __init__(self, heads: PathHeads, layout: Layout, schedule: Schedule, *, keep: bool) -> None:
        super().__init__(heads, layout, keep=keep)
        # The schedule of plain LUCID, in the order of the tree and with its blocks.
        elements = max(schedule.elements, layout.block**2)
        self.schedule = Schedule(schedule.heads, layout.block, elements, tree=True)

    def solve(self) -> Tensor:
        y = self.heads.v.clone()
        solve_(y, PathTiles(self), self.schedule, y_past=self.heads.y_past)
        return y

    def solve_backward(self, y: Tensor, dy: Tensor, dy_past: Tensor | None) -> SolveGradients:
        tiles = PathTiles(self)
        tiles.collect_gradients(row_sums=isinstance(self.heads.sharpness, Tensor))
        solve_adjoint_(dy, y, tiles, self.schedule, y_past=self.heads.y_past, dy_past=dy_past)
        tiles.finish()
        return SolveGradients(dy, tiles.dinverse, tiles.du_past, tiles.row_sums)


def one_node(x: Tensor) -> Tensor:
    """All rows as those of one node: [n, leaves, R, *] -> [n, 1, leaves · R, *]."""
    return x.flatten(1, 2)[:, None]


def _merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the softmax over other keys into o: [n, m, R, E] and lse: [n, m, R, 1], in place."""
    both = torch.logaddexp(lse, part_lse)
    o.mul_((lse - both).exp_()).addcmul_(part, (part_lse - both).exp_())
    lse.copy_(both)


class PathTiles(ExponentialTiles):
    """Tiles of P_ij = exp(c (k̂_iᵀ H_i … H_{j+1} k̂_j − 1)) over S + T positions, for the block solver.

    Rows are c k/‖k‖. Keys are those of the read-out; their 1/‖k_j‖ is a factor of the columns, because the norm
    commutes with the move of a key.
    """

    def __init__(self, tree: BlockwiseTree) -> None:
        sharpness, inverse, schedule = tree.heads.sharpness, tree.inverse, tree.schedule
        assert sharpness is not None
        alpha, shift = 1.0, None
        if isinstance(sharpness, Tensor):
            shift = sharpness
        elif sharpness > FOLDED_SHIFT:
            shift = inverse.new_full((1, 1, 1), sharpness)
        else:
            alpha = math.exp(-sharpness)
        self.scores, self.which, self.inverse, self.u_past = tree.scores, tree.last, inverse, tree.heads.u_past
        super().__init__(self.scores.rows[self.which].flatten(1, 2), alpha, shift, schedule.elements)
        self.S = 0 if self.u_past is None else self.u_past.shape[1]
        self._joins = {(join.size, join.first): join for join in self.scores.joins}
        self._keys = {place: join.k * join.left_of(inverse) for place, join in self._joins.items()}
        # Per block, as a factor of its columns.
        self._columns = inverse.flatten(1, 2).unflatten(1, (self.scores.layout.blocks, -1)).mT
        self._batch, self._batch_scores = slice(0, 0), inverse

    def make(self, rows: slice, cols: slice) -> Tensor:
        if rows != cols:
            return super().make(rows, cols)
        block, size = (rows.start - self.S) // self.scores.layout.block, rows.stop - rows.start
        if not self._batch.start <= block < self._batch.stop:
            self._batch = self._batch_of(block)
            self._batch_scores = self.scores.block_scores(self.which, self._batch.start, self._batch.stop)
        n = self.u.shape[0]
        tile = self._tile[: n * size * size].view(n, size, size)
        raw = self._batch_scores[:, block - self._batch.start, :size, :size]
        torch.mul(raw, self._columns[:, block, :, :size], out=tile)
        return self.powers_(tile.mul_(LOG2E), rows)

    def _batch_of(self, block: int) -> slice:
        """The blocks that are made in one batch with this one."""
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
        """The join (its size and first leaf), the pair, and the rows and columns of that pair that hold a tile."""
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
        """As for other tiles. Gradients of rows and keys go to `scores`, whose gradients must be allocated."""
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
        batch = self._batch_of(block)
        if self._block_grads is None:
            at_once = batch.stop - batch.start
            self._block_grads = self.u.new_zeros(tile.shape[0], at_once, layout.block, layout.block)
        here = self._block_grads[:, block - batch.start, :size, :size]
        torch.mul(self.score_grads(rows, tile, left, right, True), -self.alpha, out=here)
        if block == batch.start:
            # Blocks come from the last to the first: the batch is complete.
            self._blocks_pull_back(batch, self._block_grads)
            self._block_grads = None

    def _blocks_pull_back(self, batch: slice, grads: Tensor) -> None:
        """`_batch_scores` are those of the same blocks."""
        dinverse = self.dinverse.flatten(1, 2).unflatten(1, (self.scores.layout.blocks, -1))
        dinverse[:, batch] += (grads * self._batch_scores).sum(2)[..., None]
        grads.mul_(self._columns[:, batch])
        self.scores.block_pull_back(self.which, batch.start, batch.stop, grads)

    def finish(self) -> None:
        """Pass the gradients of the keys to `scores`, and sum those of `inverse`."""
        for place, join in self._joins.items():
            assert join.dk is not None
            dkeys = self._dkeys[place]
            join.left_of(self.dinverse).add_((dkeys * join.k).sum(-1, keepdim=True))
            join.dk += dkeys.mul_(join.left_of(self.inverse))
