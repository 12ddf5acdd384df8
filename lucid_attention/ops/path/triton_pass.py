"""PaTH, LUCID's solve on PaTH scores, or both on one tree, with Triton kernels.

The passes and the tree are those of `blockwise.py`. The read-out is torch's flash attention in the dtype of the inputs,
rectangle by rectangle. Leaves, levels and the solve are products of our own kernels, which no setting of torch makes
less precise, with float32 in memory.

A rectangle of the solve has rows, moved to the start of a right node, and keys, moved to the end of the left one:
[n, pairs, R, D'], heads, pairs of nodes of one level, rows; strides of the first two are counted in rows. Positions are
padded to whole leaves and head sizes to powers of two, with zeros, so no kernel needs a mask. A program owns a tile of
one side, the `target`, and loops over the other, the `source`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .. import packing
from ..softmax.strips import accelerated_rectangle, accelerated_rectangle_backward
from ..triangular import Schedule
from ..triton_products import TritonAlgebra
from ..triton_tiles import (
    LOG2_E,
    PRODUCT_TILE,
    Precisions,
    Tile,
    architecture,
    key_rows,
    on_device,
    padded_size,
    precisions,
    registers,
    score_tile,
)
from . import blockwise
from .blockwise import BLOCK_LEAVES, Group, HeadsTree, PathHeads, SolveGradients, Trees, heads_of, one_node
from .system import PathSystem
from .tree import Layout

# Memory that the trees of the heads in flight may take.
BYTES = 4 * 1024**3


@dataclass(frozen=True)
class PathTileSizes:
    """Of products (rows × cols of the result, `keys` deep) and of the two kernels of rectangles."""

    product: Tile
    apply: Tile
    pull: Tile


def path_tiles(architecture: str, features: int, values: int) -> PathTileSizes:
    """One fixed configuration per architecture and shape class: no autotuning, and the length is no key.

    features, values: the padded head sizes. Everything is float32 in memory, whatever the dtype of the inputs. Every
    entry compiles for its architecture without spills and within its limits (`make test-gpu-offline`).
    """
    # Where matrix instructions read registers, 64 rows with 128 values spill.
    large = architecture in ("sm_90", "sm_100", "gfx942")
    return PathTileSizes(
        product=PRODUCT_TILE,
        apply=Tile(64, 32, min(128 if large else 64, values), 32),
        pull=Tile(32, 32, 32, 32, out=min(128, features)),
    )


def forward(system: PathSystem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `blockwise.forward`."""
    with on_device(system.v):
        return blockwise.forward(system, _plan)


def backward(
    system: PathSystem, outputs: Sequence[Tensor | None], do: Tensor | None, dy: Tensor | None
) -> list[Tensor | None]:
    """As `blockwise.backward`."""
    with on_device(system.v):
        return blockwise.backward(system, outputs, do, dy, _plan)


def _plan(system: PathSystem, part: packing.Part, keep: bool) -> Trees:
    sequences = system.part(part)
    (B, H, T, D), E = sequences.k.shape, system.v.shape[3]
    G = 0 if system.q is None else system.q.shape[1] // H
    layout = Layout.of_whole_blocks(T, BLOCK_LEAVES if system.solves else 1)
    C, sizes = layout.C, (padded_size(D), padded_size(E))
    levels = max(1, (T // C).bit_length())
    per_head = 4 * (T + C) * ((G + 3) * (sizes[0] * (levels + 6) + 4 * C) + 4 * sizes[1])
    dtype = torch.promote_types(system.k.dtype, system.v.dtype)
    dtype = dtype if system.q is None else torch.promote_types(dtype, system.q.dtype)
    where = architecture(system.k.device)
    tiles, multiply = path_tiles(where, *sizes), precisions(where, dtype)

    def tree_of(group: Group) -> TritonTree:
        return TritonTree(_padded(heads_of(sequences, group)), layout, tiles, multiply, dtype, keep=keep)

    return Schedule(max(1, min(B * H, BYTES // per_head)), C, 1).groups(B, H), tree_of


def _padded(heads: PathHeads) -> PathHeads:
    """The heads with padded head sizes."""
    names = ("q", "k", "v", "w", "k_past", "y_past")
    wide: dict[str, Any] = {name: _wide(x) for name in names if (x := getattr(heads, name)) is not None}
    return replace(heads, **wide)


def _wide(x: Tensor) -> Tensor:
    """x: [*, D] -> [*, D'], contiguous."""
    return F.pad(x, (0, padded_size(x.shape[-1]) - x.shape[-1])).contiguous()


class TritonTree(HeadsTree):
    """By Triton kernels, and torch's flash attention in `dtype`."""

    def __init__(
        self, heads: PathHeads, layout: Layout, tiles: PathTileSizes, multiply: Precisions, dtype: torch.dtype, *,
        keep: bool,
    ) -> None:  # fmt: skip
        self.products = TritonAlgebra(tiles.product, multiply.keys)
        super().__init__(heads, layout, keep=keep, algebra=self.products)
        self.dtype, self.rectangles = dtype, Rectangles(tiles, multiply)

    def solve(self) -> Tensor:
        y = self.layout.cut(self.heads.v).clone()
        Solve(self).run_(y)
        return self.layout.join(y)

    def solve_backward(self, y: Tensor, dy: Tensor, dy_past: Tensor | None) -> SolveGradients:
        g = self.layout.cut(dy).clone()
        solve = Solve(self)
        solve.run_adjoint_(g)
        return solve.pull_back(self.layout.cut(y), g, dy_past)

    def attend_rectangle(self, q: Tensor, k: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = accelerated_rectangle(*(x.to(self.dtype) for x in (q, k, y)))
        return o.float(), lse

    def attend_rectangle_backward(
        self, do: Tensor, q: Tensor, k: Tensor, y: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        do, q, k, y, o = (x.to(self.dtype) for x in (do, q, k, y, o))
        dq, dk, dy = accelerated_rectangle_backward(do, q, k, y, o, lse)
        return dq.float(), dk.float(), dy.float()

    def wide(self, x: Tensor | None) -> Any:
        return None if x is None else _wide(x)


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
        exponents = self.block_scores * self.columns - self.c[:, None, None, None]
        # Only what is before the diagonal: after it a score is arbitrary, and its exponential may be infinite.
        future = torch.ones_like(exponents[0, 0], dtype=torch.bool).triu()
        self.matrix = exponents.masked_fill_(future, -math.inf).exp_()
        self.inverse = tree.products.inverse_(self.matrix.flatten(0, 1).clone()).unflatten(0, (n, -1))
        self.joins = list(tree.scores.joins)
        self.keys = [join.k * join.left_of(tree.inverse) for join in self.joins]
        self.due = {
            (join.first + 2 * pair * join.size, join.size): (join, keys, slice(pair, pair + 1))
            for join, keys in zip(self.joins, self.keys, strict=True)
            for pair in range(join.pairs)
        }
        # All rows, at the root, meet the past, padded to whole leaves: values that are zero add nothing.
        self.u_past = self.y_past = None
        if heads.u_past is not None and heads.y_past is not None:
            missing = (0, 0, 0, -heads.u_past.shape[1] % layout.C)
            self.u_past, self.y_past = (F.pad(x, missing)[:, None] for x in (heads.u_past, heads.y_past))
            self.rows = one_node(tree.scores.rows[tree.last])

    def run_(self, y: Tensor) -> None:
        """V -> Y in place: [n, leaves, C, E']."""
        tree, rectangles = self.tree, self.tree.rectangles
        if self.u_past is not None and self.y_past is not None:
            rectangles.apply_(self.rows, self.u_past, self.c, self.y_past, one_node(y), -1.0)
        for block in range(tree.layout.blocks):
            here = self._block(y, block)
            here.copy_(tree.algebra.product(self.inverse[:, block], here))
            for rows, keys, left, right in self._due(block, y):
                rectangles.apply_(rows, keys, self.c, left, right, -1.0)

    def run_adjoint_(self, g: Tensor) -> None:
        """dY -> dV in place."""
        tree = self.tree
        for block in reversed(range(tree.layout.blocks)):
            for rows, keys, left, right in self._due(block, g):
                tree.rectangles.apply_(keys, rows, self.c, right, left, -1.0)
            here = self._block(g, block)
            here.copy_(tree.algebra.product(self.inverse[:, block].mT, here))

    def _block(self, x: Tensor, block: int) -> Tensor:
        """[n, leaves, C, E'] -> [n, L·C, E'], a view."""
        L = self.tree.layout.L
        return x[:, block * L : (block + 1) * L].flatten(1, 2)

    def _due(self, block: int, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """The rectangle that is due once a block is solved: rows, keys, and the left and the right nodes of x."""
        L = self.tree.layout.L
        node = ((block + 1) & -(block + 1)) * L
        found = self.due.get(((block + 1) * L - node, node))
        if found is None:
            return []
        join, keys, pair = found
        rectangle = join.rows[self.tree.last], keys, join.left_of(x), join.right_of(x)
        return [tuple(tensor[:, pair] for tensor in rectangle)]  # type: ignore[list-item]

    def pull_back(self, y: Tensor, g: Tensor, dy_past: Tensor | None) -> SolveGradients:
        """y, g: [n, leaves, C, E'], solution and dV. dy_past: [n, S, E'], added to."""
        tree, which = self.tree, self.tree.last
        dinverse, sums = self._blocks_pull_back(y, g)
        for join, keys in zip(self.joins, self.keys, strict=True):
            assert join.dk is not None
            dkeys = torch.zeros_like(keys)
            join.drows[which].zero_()
            sums += self._pull_back(join.rows[which], keys, join.right_of(g), join.left_of(y), join.drows[which], dkeys)
            join.left_of(dinverse).add_((dkeys * join.k).sum(-1, keepdim=True))
            join.dk += dkeys.mul_(join.left_of(tree.inverse))
        du_past = None
        if self.u_past is not None and self.y_past is not None and dy_past is not None:
            S, du_past, dy = dy_past.shape[1], torch.zeros_like(self.u_past), torch.zeros_like(self.y_past)
            drows = one_node(tree.scores.drows[which])
            sums += self._pull_back(self.rows, self.u_past, one_node(g), self.y_past, drows, du_past)
            tree.rectangles.apply_(self.u_past, self.rows, self.c, one_node(g), dy, -1.0)
            dy_past += dy[:, 0, :S]
            du_past = du_past[:, 0, :S]
        row_sums = torch.stack(sums).sum(0)[:, None, None] if isinstance(tree.heads.sharpness, Tensor) else None
        return SolveGradients(tree.layout.join(g), dinverse, du_past, row_sums)

    def _pull_back(
        self, rows: Tensor, keys: Tensor, g: Tensor, y: Tensor, drows: Tensor, dkeys: Tensor
    ) -> list[Tensor]:
        """Add the gradients of rectangles to drows: [n, pairs, R, D'] and dkeys: [n, pairs, K, D'].

        Returns, for a learned sharpness, the sum of the gradients of all scores: [n].
        """
        rectangles = self.tree.rectangles
        sums = rows.new_empty(rows.shape[:3]) if isinstance(self.tree.heads.sharpness, Tensor) else None
        rectangles.pull_(rows, keys, self.c, g, y, drows, -1.0, sums)
        rectangles.pull_(keys, rows, self.c, y, g, dkeys, -1.0)
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


@dataclass(frozen=True)
class Rectangles:
    """Launches of the kernels. c: the sharpness of each head, [n]."""

    tiles: PathTileSizes
    multiply: Precisions

    def apply_(self, target: Tensor, source: Tensor, c: Tensor, y: Tensor, out: Tensor, alpha: float) -> None:
        """out += alpha · exp(target · sourceᵀ − c) · y; y, out: [n, pairs, *, E'], of source and target."""
        tile = self.tiles.apply
        width = min(tile.values, y.shape[3])
        self._launch(
            path_apply_kernel, tile, target, source, (c, y, out), (y, out), alpha, y.shape[3] // width,
            VALUES=y.shape[3], WIDTH=width, PRODUCT=self.multiply.values,
        )  # fmt: skip

    def pull_(
        self, target: Tensor, source: Tensor, c: Tensor, left: Tensor, right: Tensor, out: Tensor, alpha: float,
        sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out += alpha · W · source, W = exp(target · sourceᵀ − c) ∘ (left · rightᵀ): [n, pairs, *, D'], as target.

        left, right: [n, pairs, *, E'], of target and source. sums: [n, pairs, R] contiguous, written: the sums of
        alpha · W along the source.
        """
        tile = self.tiles.pull
        features, values = target.shape[3], left.shape[3]
        piece = min(tile.out, features)
        assert _strides(out) == _strides(target)
        self._launch(
            path_pull_kernel, tile, target, source, (c, left, right, out, c if sums is None else sums), (left, right),
            alpha, features // piece, VALUES=values, WIDTH=min(tile.values, values), OUT=piece, SUMS=sums is not None,
            PRODUCT=self.multiply.gradient,
        )  # fmt: skip

    def _launch(
        self, kernel: triton.JITFunction, tile: Tile, target: Tensor, source: Tensor, tensors: tuple[Tensor, ...],
        strided: tuple[Tensor, Tensor], alpha: float, pieces: int, **constants: Any,
    ) -> None:  # fmt: skip
        n, pairs, R, features = target.shape
        const = Constants(
            FEATURES=features, ROWS=tile.rows, COLUMNS=tile.cols, PIECE=min(tile.keys, features),
            PRECISION=self.multiply.keys, **constants,
        )  # fmt: skip
        strides = [stride for x in (target, source, *strided) for stride in _strides(x)]
        kernel[(n * pairs * (R // tile.rows), pieces)](
            target, source, *tensors, pairs, R // tile.rows, source.shape[2], *strides, alpha, const,
            num_warps=tile.warps, num_stages=tile.stages, **registers(kernel, target.device),
        )  # fmt: skip


class Constants(NamedTuple):
    """What a kernel is compiled for.

    FEATURES, VALUES: D' and E'; PIECE, WIDTH: of these, in flight; OUT: of D', written by one program; SUMS: write sums
    along the source; PRECISION: of scores; PRODUCT: of other products.
    """

    FEATURES: int
    ROWS: int
    COLUMNS: int
    PIECE: int
    PRECISION: str
    VALUES: int
    WIDTH: int
    PRODUCT: str
    OUT: int = 0
    SUMS: bool = False


def _strides(x: Tensor) -> tuple[int, int]:
    """Of heads and pairs, counted in rows."""
    assert x.stride(3) == 1
    assert x.stride(2) == x.shape[3]
    return x.stride(0) // x.shape[3], x.stride(1) // x.shape[3]


LENGTHS = ["pairs", "tiles", "sources", "target_n", "target_pair", "source_n", "source_pair"]


@triton.jit
def tile_of_program(pairs, tiles, CONST: tl.constexpr):
    """The head, the pair and the first row of the target's tile."""
    pid = tl.program_id(0)
    return (pid // (pairs * tiles)).to(tl.int64), (pid // tiles % pairs).to(tl.int64), pid % tiles * CONST.ROWS


@triton.jit(do_not_specialize=[*LENGTHS, "value_n", "value_pair", "out_n", "out_pair", "alpha"])
def path_apply_kernel(
    target, source, sharpness, values, out, pairs, tiles, sources, target_n, target_pair, source_n, source_pair,
    value_n, value_pair, out_n, out_pair, alpha, CONST: tl.constexpr,
):  # fmt: skip
    """out += alpha · exp(target · sourceᵀ − c) · values."""
    head, pair, i = tile_of_program(pairs, tiles, CONST)
    rows = tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.COLUMNS)
    wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    first_source = head * source_n + pair * source_pair
    first_value = head * value_n + pair * value_pair
    c = tl.load(sharpness + head)
    acc = tl.zeros((CONST.ROWS, CONST.WIDTH), tl.float32)
    for j in range(0, sources, CONST.COLUMNS):
        scores = score_tile(
            target, head * target_n + pair * target_pair + i, source, first_source + j,
            CONST.ROWS, CONST.COLUMNS, CONST.FEATURES, CONST.PIECE, CONST.PRECISION,
        )  # fmt: skip
        y = tl.load(values + (first_value + j + columns)[:, None] * CONST.VALUES + wide[None, :])
        acc = tl.dot(tl.exp2((scores - c) * LOG2_E), y, acc, input_precision=CONST.PRODUCT)
    here = out + (head * out_n + pair * out_pair + i + rows)[:, None] * CONST.VALUES + wide[None, :]
    tl.store(here, tl.load(here) + alpha * acc)


@triton.jit(do_not_specialize=[*LENGTHS, "left_n", "left_pair", "right_n", "right_pair", "alpha"])
def path_pull_kernel(
    target, source, sharpness, left, right, out, sums, pairs, tiles, sources, target_n, target_pair, source_n,
    source_pair, left_n, left_pair, right_n, right_pair, alpha, CONST: tl.constexpr,
):  # fmt: skip
    """out += alpha · W · source, W = exp(target · sourceᵀ − c) ∘ (left · rightᵀ): gradients of the target.

    left, right: of target and source, [*, VALUES]; out: as the target. With SUMS the sums of alpha · W along the source
    are written to sums [n, pairs, R].
    """
    head, pair, i = tile_of_program(pairs, tiles, CONST)
    rows = tl.arange(0, CONST.ROWS)
    first_target = head * target_n + pair * target_pair + i
    first_source = head * source_n + pair * source_pair
    first_right = head * right_n + pair * right_pair
    c = tl.load(sharpness + head)
    acc = tl.zeros((CONST.ROWS, CONST.OUT), tl.float32)
    total = tl.zeros((CONST.ROWS,), tl.float32)
    for j in range(0, sources, CONST.COLUMNS):
        scores = score_tile(
            target, first_target, source, first_source + j,
            CONST.ROWS, CONST.COLUMNS, CONST.FEATURES, CONST.PIECE, CONST.PRECISION,
        )  # fmt: skip
        w = score_tile(
            left, head * left_n + pair * left_pair + i, right, first_right + j,
            CONST.ROWS, CONST.COLUMNS, CONST.VALUES, CONST.WIDTH, CONST.PRODUCT,
        )  # fmt: skip
        w *= tl.exp2((scores - c) * LOG2_E)
        if CONST.SUMS:
            total += tl.sum(w, 1)
        moved = key_rows(
            source, first_source + j, CONST.FEATURES, tl.program_id(1) * CONST.OUT, CONST.COLUMNS, CONST.OUT
        )
        acc = tl.dot(w, moved, acc, input_precision=CONST.PRODUCT)
    features = tl.program_id(1) * CONST.OUT + tl.arange(0, CONST.OUT)
    here = out + (first_target + rows)[:, None] * CONST.FEATURES + features[None, :]
    tl.store(here, tl.load(here) + alpha * acc)
    if CONST.SUMS and tl.program_id(1) == 0:
        tl.store(sums + (head * pairs + pair) * (tiles * CONST.ROWS) + i + rows, alpha * total)
