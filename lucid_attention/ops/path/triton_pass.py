"""PaTH, LUCID's solve on PaTH scores, or both on one tree, by Triton kernels.

The passes and the tree are those of `blockwise.py`. Masked positions and packed documents stay where they are. A masked
position has w = 0, β = 0 and no key. Between two neighbouring nodes at most one document continues, and the factors
between its rows and its keys are its own, so a rectangle needs a comparison of documents and nothing else. The launches
of a pass therefore depend on shapes only, never on data.

Tensors are float32. Head sizes are padded to D' and E', a past to whole leaves.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import packing
from ..triangular import Schedule
from ..triton_tiles import Precisions, architecture, on_device, padded_size, precisions
from . import blockwise
from .blockwise import BLOCK_LEAVES, Backend, Group, HeadsTree, PathHeads, Plan, SolveGradients, heads_of, one_node
from .system import DIFFERENTIABLE, PathSystem
from .tree import Join, Layout
from .triton_products import TritonAlgebra
from .triton_rectangles import PathTileSizes, Rectangles, Side, path_tiles

# Memory that the trees of the heads in flight may take.
BYTES = 4 * 1024**3


def forward(system: PathSystem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `blockwise.forward`."""
    with on_device(system.v):
        return blockwise.forward(system, TRITON)


def backward(
    system: PathSystem, outputs: Sequence[Tensor | None], do: Tensor | None, dy: Tensor | None
) -> list[Tensor | None]:
    """As `blockwise.backward`."""
    with on_device(system.v):
        return blockwise.backward(system, outputs, do, dy, TRITON)


class _WholeRows(packing.Span):
    """All positions of all rows, where gradients of masked positions are zero."""

    def __init__(self, system: PathSystem) -> None:
        super().__init__()
        self.system = system

    def take_grad(self, x: Tensor) -> Tensor:
        return _zero_masked(x, self.system)


def _whole_rows(system: PathSystem) -> Iterator[packing.Part]:
    yield _WholeRows(system)


def _plan(system: PathSystem, part: packing.Part, keep: bool) -> Plan:
    (B, H, T, D), E = system.k.shape, system.v.shape[3]
    G = 0 if system.q is None else system.q.shape[1] // H
    layout = Layout.of_whole_blocks(T, BLOCK_LEAVES if system.solves else 1)
    C, sizes = layout.C, (padded_size(D), padded_size(E))
    levels = max(1, (T // C).bit_length())
    per_head = 4 * (T + C) * ((G + 3) * (sizes[0] * (levels + 6) + 4 * C) + 4 * sizes[1])
    where = architecture(system.k.device)
    dtype = torch.promote_types(system.k.dtype, system.v.dtype)
    dtype = dtype if system.q is None else torch.promote_types(dtype, system.q.dtype)
    tiles, multiply = path_tiles(where, *sizes), precisions(where, dtype)
    documents, clean = Documents.of(system, layout), _clean(system)

    def tree_of(group: Group) -> TritonTree:
        heads, kv_heads = _padded(heads_of(clean, group), C), len(range(*group[1].indices(H)))
        return TritonTree(heads, layout, tiles, multiply, kv_heads, documents.rows(group[0]), keep=keep)

    return Schedule(max(1, min(B * H, BYTES // per_head)), C, 1).groups(B, H), tree_of


TRITON = Backend(_whole_rows, _plan)


def _clean(system: PathSystem) -> PathSystem:
    """The system with zeros at masked positions."""
    if system.key_mask is None:
        return system
    tensors = {name: x for name in DIFFERENTIABLE[:-1] if (x := getattr(system, name)) is not None}
    past = ("k_past", "y_past", "inverse_norms")
    clean: dict[str, Any] = {name: _zero_masked(x, system, past=name in past) for name, x in tensors.items()}
    return replace(system, **clean)


def _zero_masked(x: Tensor, system: PathSystem, past: bool = False) -> Tensor:
    """x: [B, H, T, *] with zeros at masked positions."""
    if system.key_mask is None:
        return x
    S = system.past_length
    hidden = ~(system.key_mask[:, :S] if past else system.key_mask[:, S:])
    return x.masked_fill(hidden.view(hidden.shape[0], 1, -1, *[1] * (x.ndim - 3)), 0)


def _padded(heads: PathHeads, leaf: int) -> PathHeads:
    """The heads with padded head sizes (all but v), and a past of whole leaves."""
    wide: dict[str, Any] = {name: _wide(x) for name in ("q", "k", "w") if (x := getattr(heads, name)) is not None}
    if heads.k_past is not None:
        missing = -heads.k_past.shape[1] % leaf
        for name in ("k_past", "y_past"):
            wide[name] = F.pad(_wide(getattr(heads, name)), (0, 0, 0, missing))
        if heads.inverse_norms is not None:
            wide["inverse_norms"] = F.pad(heads.inverse_norms, (0, 0, 0, missing))
    return replace(heads, **wide)


def _wide(x: Tensor) -> Tensor:
    """x: [*, D] -> [*, D'], contiguous."""
    return F.pad(x, (0, padded_size(x.shape[-1]) - x.shape[-1])).contiguous()


@dataclass(frozen=True)
class Documents:
    """The documents of positions: those of different documents do not see each other.

    ids: [B, positions of all leaves], −1 for masked positions; past_ids: [B, S'], the same of the past; bounds:
    [2, as ids], where the document of a position starts and ends. None: every position sees all before it.
    only_past: only the past has masked positions (those that pad it).
    """

    ids: Tensor | None
    past_ids: Tensor | None
    bounds: Tensor | None
    only_past: bool = False

    @staticmethod
    def of(system: PathSystem, layout: Layout) -> "Documents":
        (B, _, T, _), S, mask, device = system.k.shape, system.past_length, system.key_mask, system.k.device
        if mask is None and system.cu_seqlens is None and S == 0:
            return Documents(None, None, None)
        positions, past_positions, bounds = layout.leaves * layout.C, -(-S // layout.C) * layout.C, None
        if system.cu_seqlens is not None:
            bounds = packing.document_bounds(system.cu_seqlens, T, positions, device)
        ids = torch.zeros(B, positions, dtype=torch.int32, device=device) if bounds is None else bounds[:1].repeat(B, 1)
        past_ids = torch.zeros(B, past_positions, dtype=torch.int32, device=device)
        past_ids[:, S:] = -1
        if mask is not None:
            ids[:, :T].masked_fill_(~mask[:, S:], -1)
            past_ids[:, :S].masked_fill_(~mask[:, :S], -1)
        return Documents(ids, past_ids, bounds, only_past=mask is None and bounds is None)

    def rows(self, where: slice) -> "Documents":
        """Those of some rows of the batch."""
        ids, past_ids = (None if x is None else x[where] for x in (self.ids, self.past_ids))
        return replace(self, ids=ids, past_ids=past_ids)


class TritonTree(HeadsTree):
    """By Triton kernels. kv_heads: heads of each row of the batch."""

    def __init__(
        self,
        heads: PathHeads,
        layout: Layout,
        tiles: PathTileSizes,
        multiply: Precisions,
        kv_heads: int,
        documents: Documents,
        *,
        keep: bool,
    ) -> None:
        self.algebra = TritonAlgebra(tiles.product, multiply.keys, layout.C)
        super().__init__(heads, layout, keep=keep, algebra=self.algebra)
        self.kv_heads, self.documents = kv_heads, documents
        self.E, self.groups = heads.v.shape[2], 0 if heads.q is None else heads.q.shape[1]
        # Scores of a read-out need no more precision than its products with values.
        self.readout = Rectangles(tiles, replace(multiply, keys=multiply.values), kv_heads, layout.C)
        self.rectangles = Rectangles(tiles, multiply, kv_heads, layout.C)

    def solve(self) -> Tensor:
        y = self.cut_values(self.heads.v).clone()
        Solve(self).run_(y)
        return self.layout.join(y)[..., : self.E]

    def solve_backward(self, y: Tensor, dy: Tensor, dy_past: Tensor | None) -> SolveGradients:
        g = self.cut_values(dy).clone()
        solve = Solve(self)
        solve.run_adjoint_(g)
        return solve.pull_back(self.cut_values(y), g, dy_past)

    def attend(self, y: Tensor) -> tuple[Tensor, Tensor]:
        p, y = self._leaf_scores(), self.cut_values(y)
        lse = p.logsumexp(-1)
        o = self.algebra.product(p.sub_(lse[..., None]).exp_(), y)
        for join in self.scores.all_joins():
            rows, keys = self.sides(join, 0)
            self.readout.attend_(rows, keys, self.groups, join.left_of(y), join.right_of(o), join.right_of(lse))
        if self.heads.past is not None:
            k_past, y_past = self.heads.past
            rows, keys = self.past_sides(0, k_past)
            self.readout.attend_(rows, keys, self.groups, y_past[:, None], one_node(o), one_node(lse))
        layout = self.layout
        return layout.join_rows(o)[..., : self.E], layout.join_rows(lse[..., None])[..., 0]

    def attend_backward(
        self, y: Tensor, do: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        layout, scores, algebra, y = self.layout, self.scores, self.algebra, self.cut_values(y)
        do, o = (layout.cut_rows(_wide(x)).contiguous() for x in (do, o))
        lse = layout.cut_rows(lse[..., None])[..., 0].contiguous()
        p = self._leaf_scores().sub_(lse[..., None]).exp_()
        along = (do * o).sum(-1)
        dy = algebra.product(p.mT, do)
        scores.leaf_pull_back(0, p.mul_(algebra.product(do, y.mT).sub_(along[..., None])))
        for join in scores.all_joins():
            assert join.dk is not None
            join.drows[0].zero_()
            of_rows = join.right_of(do), join.right_of(lse), join.right_of(along)
            self._pull_back(self.sides(join, 0), *of_rows, join.left_of(y), join.drows[0], join.dk, join.left_of(dy))
        dpast = None
        if self.heads.past is not None:
            k_past, y_past = self.heads.past
            dpast = torch.zeros_like(k_past), torch.zeros_like(y_past)
            of_rows = one_node(do), one_node(lse), one_node(along)
            of_past = y_past[:, None], one_node(scores.drows[0]), dpast[0][:, None], dpast[1][:, None]
            self._pull_back(self.past_sides(0, k_past), *of_rows, *of_past)
        return layout.join(dy)[..., : self.E], dpast

    def _pull_back(
        self, sides: tuple[Side, Side], do: Tensor, lse: Tensor, along: Tensor, y: Tensor, drows: Tensor, dkeys: Tensor,
        dy: Tensor,
    ) -> None:  # fmt: skip
        """Add the gradients of rectangles to drows, dkeys and dy: [n, pairs, *, *] of rows, keys and values.

        do: [n, pairs, R, E']; lse and along, the sums of do · o: [n, pairs, R].
        """
        (rows, keys), readout, G = sides, self.readout, self.groups
        readout.pull_(rows, keys, G, lse, along, do, y, drows, 1.0, to_rows=True)
        readout.pull_(keys, rows, G, lse, along, y, do, dkeys, 1.0, to_rows=False)
        readout.apply_(keys, rows, G, lse, do, dy, 1.0, to_rows=False)

    def _leaf_scores(self) -> Tensor:
        """[n, leaves, G·C, C], −∞ where a key is not visible."""
        scores = self.scores.leaf_scores(0).unflatten(2, (self.groups, self.layout.C))
        return self.per_row(scores).masked_fill(self.hidden(1)[:, :, :, None], -math.inf).flatten(0, 1).flatten(2, 3)

    def cut_values(self, x: Tensor) -> Tensor:
        """[n, T, E] -> [n, leaves, C, E'], contiguous."""
        return self.layout.cut(_wide(x))

    def sides(self, join: Join, which: int, keys: Tensor | None = None) -> tuple[Side, Side]:
        """Rows and keys of a join."""
        documents, C = self.documents, self.layout.C
        ids = None if documents.only_past else documents.ids
        starts, ends = (None, None) if documents.bounds is None else documents.bounds
        right, left, step = (join.first + join.size) * C, join.first * C, 2 * join.size * C
        keys = join.k if keys is None else keys
        return Side(join.rows[which], ids, right, step, starts), Side(keys, ids, left, step, ends)

    def past_sides(self, which: int, keys: Tensor) -> tuple[Side, Side]:
        """All rows, at the root, and keys of the past [n, S', D']."""
        return Side(one_node(self.scores.rows[which]), self.documents.ids), Side(keys[:, None], self.documents.past_ids)

    def hidden(self, size: int) -> Tensor:
        """Which keys are not visible within blocks of `size` leaves: [1 or B, 1, blocks, size·C, size·C]."""
        C, device = size * self.layout.C, self.k.device
        future = torch.ones(C, C, dtype=torch.bool, device=device).triu(1)[None, None, None]
        ids = self.documents.ids
        if ids is None or self.documents.only_past:
            return future
        ids = ids[:, None].unflatten(2, (-1, C))
        other = (ids[..., :, None] != ids[..., None, :]) | (ids < 0)[..., None, :]
        own = torch.eye(C, dtype=torch.bool, device=device)
        # A position always sees itself, even if it is masked: nothing is divided by zero.
        return future | (other & ~own)

    def per_row(self, x: Tensor) -> Tensor:
        """[n, *] -> [B, H, *]."""
        return x.unflatten(0, (-1, self.kv_heads))


class Solve:
    """Y = P⁻¹ V on the last set of rows of a tree.

    All diagonal blocks of 256 positions are inverted at once. Once a block is solved, the one rectangle that is due
    then is subtracted from the rows after it.
    """

    def __init__(self, tree: TritonTree) -> None:
        heads, layout, self.tree = tree.heads, tree.layout, tree
        assert heads.sharpness is not None
        n, c = heads.k.shape[0], heads.sharpness
        self.c = c.reshape(n).contiguous() if isinstance(c, Tensor) else heads.k.new_full((n,), c)
        # A factor of the columns of blocks.
        self.columns = tree.inverse.flatten(1, 2).unflatten(1, (layout.blocks, -1)).mT
        self.block_scores = tree.scores.block_scores(tree.last, 0, layout.blocks)
        exponents = tree.per_row(self.block_scores * self.columns - self.c[:, None, None, None])
        hidden = tree.hidden(layout.L) | torch.eye(layout.block, dtype=torch.bool, device=exponents.device)
        self.matrix = exponents.masked_fill(hidden, -math.inf).exp_().flatten(0, 1)
        self.inverse = tree.algebra.inverse(self.matrix.flatten(0, 1)).unflatten(0, (n, -1))
        self.joins = list(tree.scores.joins)
        self.keys = [join.k * join.left_of(tree.inverse) for join in self.joins]
        self.due = {
            (join.first + 2 * pair * join.size, join.size): (join, keys, pair)
            for join, keys in zip(self.joins, self.keys, strict=True)
            for pair in range(join.pairs)
        }
        self.u_past = heads.u_past

    def run_(self, y: Tensor) -> None:
        """V -> Y in place: [n, leaves, C, E']."""
        tree, rectangles = self.tree, self.tree.rectangles
        if self.u_past is not None and tree.heads.y_past is not None:
            rows, keys = tree.past_sides(tree.last, self.u_past)
            rectangles.apply_(rows, keys, 1, self.c, tree.heads.y_past[:, None], one_node(y), -1.0, to_rows=True)
        for block in range(tree.layout.blocks):
            here = self._block(y, block)
            here.copy_(tree.algebra.product(self.inverse[:, block], here))
            for rows, keys, left, right in self._due(block, y):
                rectangles.apply_(rows, keys, 1, self.c, left, right, -1.0, to_rows=True)

    def run_adjoint_(self, g: Tensor) -> None:
        """dY -> dV in place."""
        tree = self.tree
        for block in reversed(range(tree.layout.blocks)):
            for rows, keys, left, right in self._due(block, g):
                tree.rectangles.apply_(keys, rows, 1, self.c, right, left, -1.0, to_rows=False)
            here = self._block(g, block)
            here.copy_(tree.algebra.product(self.inverse[:, block].mT, here))

    def _block(self, x: Tensor, block: int) -> Tensor:
        """[n, leaves, C, E'] -> [n, L·C, E'], a view."""
        L = self.tree.layout.L
        return x[:, block * L : (block + 1) * L].flatten(1, 2)

    def _due(self, block: int, x: Tensor) -> list[tuple[Side, Side, Tensor, Tensor]]:
        """The rectangle that is due once a block is solved: rows, keys, and the left and the right nodes of x."""
        L = self.tree.layout.L
        node = ((block + 1) & -(block + 1)) * L
        found = self.due.get(((block + 1) * L - node, node))
        if found is None:
            return []
        join, keys, pair = found
        rows, columns = (side.pair(pair) for side in self.tree.sides(join, self.tree.last, keys))
        return [(rows, columns, join.left_of(x)[:, pair : pair + 1], join.right_of(x)[:, pair : pair + 1])]

    def pull_back(self, y: Tensor, g: Tensor, dy_past: Tensor | None) -> SolveGradients:
        """y, g: [n, leaves, C, E'], solution and dV. dy_past: [n, S', E'], added to."""
        tree, which = self.tree, self.tree.last
        dinverse, sums = self._blocks_pull_back(y, g)
        for join, keys in zip(self.joins, self.keys, strict=True):
            assert join.dk is not None
            dkeys = torch.zeros_like(keys)
            join.drows[which].zero_()
            of_values = join.right_of(g), join.left_of(y)
            sums += self._pull_back(tree.sides(join, which, keys), *of_values, join.drows[which], dkeys)
            join.left_of(dinverse).add_((dkeys * join.k).sum(-1, keepdim=True))
            join.dk += dkeys.mul_(join.left_of(tree.inverse))
        du_past = None
        if self.u_past is not None and tree.heads.y_past is not None and dy_past is not None:
            du_past = torch.zeros_like(self.u_past)
            rows, past = sides = tree.past_sides(which, self.u_past)
            drows = one_node(tree.scores.drows[which])
            sums += self._pull_back(sides, one_node(g), tree.heads.y_past[:, None], drows, du_past[:, None])
            tree.rectangles.apply_(past, rows, 1, self.c, one_node(g), dy_past[:, None], -1.0, to_rows=False)
        row_sums = torch.stack(sums).sum(0)[:, None, None] if isinstance(tree.heads.sharpness, Tensor) else None
        return SolveGradients(tree.layout.join(g)[..., : tree.E], dinverse, du_past, row_sums)

    def _pull_back(self, sides: tuple[Side, Side], g: Tensor, y: Tensor, drows: Tensor, dkeys: Tensor) -> list[Tensor]:
        """Add the gradients of rectangles to drows: [n, pairs, R, D'] and dkeys: [n, pairs, K, D'].

        Returns, for a learned sharpness, the sum of the gradients of all scores: [n].
        """
        (rows, keys), rectangles = sides, self.tree.rectangles
        sums = rows.x.new_empty(rows.x.shape[:3]) if isinstance(self.tree.heads.sharpness, Tensor) else None
        rectangles.pull_(rows, keys, 1, self.c, None, g, y, drows, -1.0, to_rows=True, sums=sums)
        rectangles.pull_(keys, rows, 1, self.c, None, y, g, dkeys, -1.0, to_rows=False)
        return [] if sums is None else [sums.sum((1, 2))]

    def _blocks_pull_back(self, y: Tensor, g: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Set the gradients of scores inside blocks; return those of 1/‖k‖: [n, leaves, C, 1], and their sums: [n]."""
        tree, layout = self.tree, self.tree.layout
        g, y = (x.unflatten(1, (layout.blocks, layout.L)).flatten(2, 3) for x in (g, y))
        grads = tree.algebra.product(g, y.mT).mul_(self.matrix).neg_()
        sums = grads.sum((1, 2, 3))
        dinverse = (grads * self.block_scores).sum(2).view(tree.inverse.shape)
        tree.scores.block_pull_back(tree.last, 0, layout.blocks, grads.mul_(self.columns))
        return dinverse, [sums]
