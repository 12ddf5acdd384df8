"""The rectangles of the tree by Triton kernels: softmax attention, products with exp(scores), and gradients.

A rectangle is a join of the tree (`tree.py`): rows of a right node, moved to its start, and keys of a left node, moved
to its end. Everything is float32 in memory, and padded: positions to whole leaves of 64 (LEAF), head sizes to powers of
two, so no kernel needs a mask for the border. Tensors are [n, pairs, R, FEATURES]: heads, rectangles of one level,
rows. Strides of the first two are counted in rows. A leaf of rows holds SETS sets (the query heads of a group) of its
positions, one after the other; a leaf of keys holds one.

`target` and `source` are the two sides of a rectangle. A program owns a tile of the target and loops over the source.
Rows may be the target and keys the source, or the other way round: then the tile is made transposed, by exchanging the
operands.

ids: for each row of the batch and position, its document, −1 if it is masked: [B, positions], int32.
bounds: for packed documents, per position, the start (if rows are the target) or the end of its document.

Constants are one argument. Lengths and strides are not: Triton 3.9 specialises the integers of a tuple on 1 and on
multiples of 16 even if `do_not_specialize` names the tuple, and would compile again for another length.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..triton_tiles import LOG2_E, Precisions, Tile, key_rows, registers, score_tile

# Arguments of all three kernels that depend on lengths.
LENGTHS = [
    "H", "pairs", "tiles", "sources", "target_n", "target_pair", "source_n", "source_pair", "target_ids_row",
    "source_ids_row", "target_position", "target_step", "source_position", "source_step",
]  # fmt: skip


@dataclass(frozen=True)
class PathTileSizes:
    """Of products (rows × cols of the result, `keys` deep) and of the three kernels of rectangles."""

    product: Tile
    attend: Tile
    apply: Tile
    pull: Tile


def path_tiles(architecture: str, features: int, values: int) -> PathTileSizes:
    """One fixed configuration per architecture and shape class: no autotuning, and the length is no key.

    features, values: the padded head sizes. Everything is float32 in memory, whatever the dtype of the inputs. Every
    entry compiles for its architecture without spills and within its limits (`make test-gpu-offline`).
    """
    # Where matrix instructions read registers, 64 rows with 128 values spill.
    large = architecture in ("sm_90", "sm_100", "gfx942")
    width = min(128, values)
    return PathTileSizes(
        product=Tile(64, 64, 0, 32),
        attend=Tile(64 if large else 32, 32, min(64, width) if architecture in ("sm_90", "sm_120") else width, 32),
        apply=Tile(64, 32, width if large else min(64, values), 32),
        pull=Tile(32, 32, 32, 32, out=min(128, features)),
    )


@dataclass(frozen=True)
class Side:
    """One side of a rectangle.

    x: [n, pairs, R, D'], D' padded; ids: [B, positions] int32, None if nothing is masked or packed; position: of the
    first row of the first pair; step: positions from one pair to the next; bounds: [positions] int32, the start (of
    rows) or the end (of keys) of each position's document, None without packed documents.
    """

    x: Tensor
    ids: Tensor | None
    position: int = 0
    step: int = 0
    bounds: Tensor | None = None

    def pair(self, index: int) -> "Side":
        """The side of one of the pairs."""
        return replace(self, x=self.x[:, index : index + 1], position=self.position + index * self.step)


@dataclass(frozen=True)
class Rectangles:
    """Launches of the kernels, in leaves of `leaf` positions. heads: H, of a row of the batch.

    sets, in what follows: how many sets of rows a leaf holds. shifts: one per head, [n], or one per row, [n, pairs, R].
    """

    tiles: PathTileSizes
    multiply: Precisions
    heads: int
    leaf: int

    def attend_(self, rows: Side, keys: Side, sets: int, y: Tensor, o: Tensor, lse: Tensor) -> None:
        """Merge softmax attention over `keys` into o: [n, pairs, R, E'] and lse: [n, pairs, R]."""
        tile, new_lse = self.tiles.attend, lse.new_empty(lse.shape)
        width = min(tile.values, y.shape[3])
        _check_shifts(lse, o)
        constants = self._constants(rows, keys, tile, sets)._replace(
            VALUES=y.shape[3], WIDTH=width, ROW_TARGET=True, PRODUCT=self.multiply.values
        )
        path_attend_kernel[self._grid(rows, tile, y.shape[3] // width)](
            rows.x, keys.x, y, o, lse, new_lse, *self._common(rows, keys, tile), *_strides(y), *_strides(o), constants,
            **_options(path_attend_kernel, tile, o),
        )  # fmt: skip
        lse.copy_(new_lse)

    def apply_(
        self, target: Side, source: Side, sets: int, shifts: Tensor, y: Tensor, out: Tensor, alpha: float, *,
        to_rows: bool,
    ) -> None:  # fmt: skip
        """out += alpha · exp(target · sourceᵀ − shifts) · y: [n, pairs, *, E'].

        The shifts are those of the rows, which are the target if `to_rows`, otherwise the source.
        """
        tile = self.tiles.apply
        width = min(tile.values, y.shape[3])
        _check_shifts(shifts, out if to_rows else y)
        constants = self._constants(target, source, tile, sets)._replace(
            VALUES=y.shape[3], WIDTH=width, ROW_TARGET=to_rows, PER_ROW=shifts.ndim == 3, PRODUCT=self.multiply.values
        )
        path_apply_kernel[self._grid(target, tile, y.shape[3] // width)](
            target.x, source.x, shifts, y, out, *self._common(target, source, tile), *_strides(y), *_strides(out),
            alpha, constants, **_options(path_apply_kernel, tile, out),
        )  # fmt: skip

    def pull_(
        self, target: Side, source: Side, sets: int, shifts: Tensor, along: Tensor | None, left: Tensor, right: Tensor,
        out: Tensor, alpha: float, *, to_rows: bool, sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out += alpha · W · source, W = exp(target · sourceᵀ − shifts) ∘ (left · rightᵀ − along): [n, pairs, *, D'].

        left, right: [n, pairs, *, E'], of target and source; along: as shifts, for shifts per row only. sums:
        [n, pairs, R] contiguous, written: the sums of alpha · W along the source.
        """
        tile = self.tiles.pull
        features, values = target.x.shape[3], left.shape[3]
        piece = min(tile.out, features)
        assert (along is not None) == (shifts.ndim == 3)
        for x in (shifts, along):
            _check_shifts(x, left if to_rows else right)
        assert _strides(out) == _strides(target.x)
        constants = self._constants(target, source, tile, sets)._replace(
            VALUES=values, WIDTH=min(tile.values, values), OUT=piece, ROW_TARGET=to_rows, PER_ROW=along is not None,
            SUMS=sums is not None, PRODUCT=self.multiply.gradient,
        )  # fmt: skip
        path_pull_kernel[self._grid(target, tile, features // piece)](
            target.x, source.x, shifts, shifts if along is None else along, left, right, out,
            shifts if sums is None else sums, *self._common(target, source, tile), *_strides(left), *_strides(right),
            alpha, constants, **_options(path_pull_kernel, tile, out),
        )  # fmt: skip

    def _grid(self, target: Side, tile: Tile, pieces: int) -> tuple[int, int]:
        n, pairs, R, _ = target.x.shape
        return n * pairs * (R // tile.rows), pieces

    def _common(self, target: Side, source: Side, tile: Tile) -> list[object]:
        """ids, bounds and `LENGTHS`. Arguments that are absent are never read."""
        _, pairs, R, _ = target.x.shape
        ids, id_strides = (target.x, target.x), (0, 0)
        if target.ids is not None and source.ids is not None:
            ids, id_strides = (target.ids, source.ids), (target.ids.stride(0), source.ids.stride(0))
        bounds = target.x if target.bounds is None else target.bounds
        sides = *_strides(target.x), *_strides(source.x)
        positions = target.position, target.step, source.position, source.step
        return [*ids, bounds, self.heads, pairs, R // tile.rows, source.x.shape[2], *sides, *id_strides, *positions]

    def _constants(self, target: Side, source: Side, tile: Tile, sets: int) -> "Constants":
        features = target.x.shape[3]
        return Constants(
            FEATURES=features, SETS=sets, LEAF=self.leaf, ROWS=tile.rows, COLUMNS=tile.cols,
            PIECE=min(tile.keys, features), MASKED=target.ids is not None and source.ids is not None,
            PACKED=target.bounds is not None, PRECISION=self.multiply.keys,
        )  # fmt: skip


def _options(kernel: triton.JITFunction, tile: Tile, out: Tensor) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages, **registers(kernel, out.device)}


class Constants(NamedTuple):
    """What a kernel is compiled for.

    FEATURES, VALUES: D' and E'; PIECE, WIDTH: of these, in flight; OUT: of D', written by one program; ROW_TARGET:
    rows are the target; PER_ROW: one shift per row, not per head; SUMS: write sums along the source; MASKED: compare
    ids; PACKED: read bounds; PRECISION: of scores; PRODUCT: of other products.
    """

    FEATURES: int
    SETS: int
    LEAF: int
    ROWS: int
    COLUMNS: int
    PIECE: int
    MASKED: bool
    PACKED: bool
    PRECISION: str
    VALUES: int = 0
    WIDTH: int = 0
    OUT: int = 0
    ROW_TARGET: bool = False
    PER_ROW: bool = False
    SUMS: bool = False
    PRODUCT: str = ""


def _strides(x: Tensor) -> tuple[int, int]:
    """Of heads and pairs, counted in rows."""
    assert x.stride(3) == 1
    assert x.stride(2) == x.shape[3]
    return x.stride(0) // x.shape[3], x.stride(1) // x.shape[3]


def _check_shifts(x: Tensor | None, rows: Tensor) -> None:
    """x: [n], contiguous, or [n, pairs, R] with the strides of rows: [n, pairs, R, E'], counted in rows."""
    assert x is None or x.stride() == ((1,) if x.ndim == 1 else (*_strides(rows), 1))


@triton.jit
def tile_of_program(pairs, tiles, CONST: tl.constexpr):
    """The head, the pair and the first row of the target's tile."""
    pid = tl.program_id(0)
    return (pid // (pairs * tiles)).to(tl.int64), (pid // tiles % pairs).to(tl.int64), pid % tiles * CONST.ROWS


@triton.jit
def position_of(row, CONST: tl.constexpr):
    """The position, within its node, of a row that is the first of a tile."""
    return row // (CONST.SETS * CONST.LEAF) * CONST.LEAF + row % CONST.LEAF


@triton.jit
def same_document(target_ids, source_ids, CONST: tl.constexpr):
    """Whether a target sees a source: [ROWS, COLUMNS]."""
    target = tl.load(target_ids + tl.arange(0, CONST.ROWS))[:, None]
    source = tl.load(source_ids + tl.arange(0, CONST.COLUMNS))[None, :]
    return (target == source) & (source >= 0)


@triton.jit
def source_range(bounds, target_position, source_position, sources, CONST: tl.constexpr):
    """The rows of the source in the documents of a tile of the target. Positions are those of the whole row."""
    low = sources * 0
    high = sources
    if CONST.PACKED:
        if CONST.ROW_TARGET:
            start = tl.maximum(tl.load(bounds + target_position) - source_position, 0)
            low = tl.minimum(start // CONST.COLUMNS * CONST.COLUMNS, sources)
        else:
            stop = tl.maximum(tl.load(bounds + target_position + CONST.ROWS - 1) - source_position, 0)
            high = tl.minimum((stop + CONST.LEAF - 1) // CONST.LEAF * (CONST.SETS * CONST.LEAF), sources)
    return low, high


@triton.jit(do_not_specialize=[*LENGTHS, "value_n", "value_pair", "out_n", "out_pair"])
def path_attend_kernel(
    target, source, values, out, lse, new_lse, target_ids, source_ids, bounds,
    H, pairs, tiles, sources, target_n, target_pair, source_n, source_pair, target_ids_row, source_ids_row,
    target_position, target_step, source_position, source_step, value_n, value_pair, out_n, out_pair,
    CONST: tl.constexpr,
):  # fmt: skip
    """Merge the softmax attention of a rectangle into out and lse, both finite.

    out is written in place, the log-sum-exps to new_lse [n, pairs, R], since programs of all pieces of the values read
    lse.
    """
    head, pair, i = tile_of_program(pairs, tiles, CONST)
    rows = tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.COLUMNS)
    wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    first_source = head * source_n + pair * source_pair
    first_value = head * value_n + pair * value_pair
    at = target_position + pair * target_step + position_of(i, CONST)
    begin = source_position + pair * source_step
    low, high = source_range(bounds, at, begin, sources, CONST)
    out_rows = head * out_n + pair * out_pair + i + rows
    here = out + out_rows[:, None] * CONST.VALUES + wide[None, :]
    acc = tl.load(here)
    top = tl.load(lse + out_rows) * LOG2_E
    total = tl.full((CONST.ROWS,), 1.0, tl.float32)
    for j in range(low, high, CONST.COLUMNS):
        scores = score_tile(
            target, head * target_n + pair * target_pair + i, source, first_source + j,
            CONST.ROWS, CONST.COLUMNS, CONST.FEATURES, CONST.PIECE, CONST.PRECISION, False,
        )  # fmt: skip
        scores *= LOG2_E
        if CONST.MASKED:
            same = same_document(
                target_ids + head // H * target_ids_row + at,
                source_ids + head // H * source_ids_row + begin + j,
                CONST,
            )
            scores = tl.where(same, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        factor = tl.exp2(top - higher)
        total = total * factor + tl.sum(p, 1)
        y = tl.load(values + (first_value + j + columns)[:, None] * CONST.VALUES + wide[None, :])
        acc = tl.dot(p, y, acc * factor[:, None], input_precision=CONST.PRODUCT)
        top = higher
    tl.store(here, acc / total[:, None])
    if tl.program_id(1) == 0:
        tl.store(new_lse + (head * pairs + pair) * (tiles * CONST.ROWS) + i + rows, (top + tl.log2(total)) / LOG2_E)


@triton.jit(do_not_specialize=[*LENGTHS, "value_n", "value_pair", "out_n", "out_pair", "alpha"])
def path_apply_kernel(
    target, source, shifts, values, out, target_ids, source_ids, bounds,
    H, pairs, tiles, sources, target_n, target_pair, source_n, source_pair, target_ids_row, source_ids_row,
    target_position, target_step, source_position, source_step, value_n, value_pair, out_n, out_pair, alpha,
    CONST: tl.constexpr,
):  # fmt: skip
    """out += alpha · exp(target · sourceᵀ − shift) · values. The shifts are of the heads or, PER_ROW, of the rows."""
    head, pair, i = tile_of_program(pairs, tiles, CONST)
    rows = tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.COLUMNS)
    wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    first_source = head * source_n + pair * source_pair
    first_value = head * value_n + pair * value_pair
    first_out = head * out_n + pair * out_pair
    at = target_position + pair * target_step + (position_of(i, CONST) if CONST.ROW_TARGET else i)
    begin = source_position + pair * source_step
    low, high = source_range(bounds, at, begin, sources, CONST)
    if not CONST.PER_ROW:
        shift = tl.load(shifts + head)
    elif CONST.ROW_TARGET:
        shift = tl.load(shifts + first_out + i + rows)[:, None]
    acc = tl.zeros((CONST.ROWS, CONST.WIDTH), tl.float32)
    for j in range(low, high, CONST.COLUMNS):
        scores = score_tile(
            target, head * target_n + pair * target_pair + i, source, first_source + j,
            CONST.ROWS, CONST.COLUMNS, CONST.FEATURES, CONST.PIECE, CONST.PRECISION, False,
        )  # fmt: skip
        if CONST.PER_ROW and not CONST.ROW_TARGET:
            shift = tl.load(shifts + first_value + j + columns)[None, :]
        tile = tl.exp2((scores - shift) * LOG2_E)
        if CONST.MASKED:
            there = j if CONST.ROW_TARGET else position_of(j, CONST)
            same = same_document(
                target_ids + head // H * target_ids_row + at,
                source_ids + head // H * source_ids_row + begin + there,
                CONST,
            )
            tile = tl.where(same, tile, 0.0)
        y = tl.load(values + (first_value + j + columns)[:, None] * CONST.VALUES + wide[None, :])
        acc = tl.dot(tile, y, acc, input_precision=CONST.PRODUCT)
    here = out + (first_out + i + rows)[:, None] * CONST.VALUES + wide[None, :]
    tl.store(here, tl.load(here) + alpha * acc)


@triton.jit(do_not_specialize=[*LENGTHS, "left_n", "left_pair", "right_n", "right_pair", "alpha"])
def path_pull_kernel(
    target, source, shifts, along, left, right, out, sums, target_ids, source_ids, bounds,
    H, pairs, tiles, sources, target_n, target_pair, source_n, source_pair, target_ids_row, source_ids_row,
    target_position, target_step, source_position, source_step, left_n, left_pair, right_n, right_pair, alpha,
    CONST: tl.constexpr,
):  # fmt: skip
    """out += alpha · W · source, W = exp(target · sourceᵀ − shift) ∘ (left · rightᵀ − along): gradients of the target.

    left, right: of target and source, [*, VALUES]; out: as the target. PER_ROW: shift and along are those of the rows;
    otherwise there is one shift per head, and along is 0. With SUMS the sums of alpha · W along the source are written
    to sums [n, pairs, R].
    """
    head, pair, i = tile_of_program(pairs, tiles, CONST)
    rows = tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.COLUMNS)
    first_target = head * target_n + pair * target_pair
    first_source = head * source_n + pair * source_pair
    first_left = head * left_n + pair * left_pair
    first_right = head * right_n + pair * right_pair
    at = target_position + pair * target_step + (position_of(i, CONST) if CONST.ROW_TARGET else i)
    begin = source_position + pair * source_step
    low, high = source_range(bounds, at, begin, sources, CONST)
    if not CONST.PER_ROW:
        shift = tl.load(shifts + head)
    elif CONST.ROW_TARGET:
        shift = tl.load(shifts + first_left + i + rows)[:, None]
        less = tl.load(along + first_left + i + rows)[:, None]
    acc = tl.zeros((CONST.ROWS, CONST.OUT), tl.float32)
    total = tl.zeros((CONST.ROWS,), tl.float32)
    for j in range(low, high, CONST.COLUMNS):
        scores = score_tile(
            target, first_target + i, source, first_source + j,
            CONST.ROWS, CONST.COLUMNS, CONST.FEATURES, CONST.PIECE, CONST.PRECISION, False,
        )  # fmt: skip
        w = score_tile(
            left, first_left + i, right, first_right + j,
            CONST.ROWS, CONST.COLUMNS, CONST.VALUES, CONST.WIDTH, CONST.PRODUCT, False,
        )  # fmt: skip
        if CONST.PER_ROW:
            if not CONST.ROW_TARGET:
                shift = tl.load(shifts + first_right + j + columns)[None, :]
                less = tl.load(along + first_right + j + columns)[None, :]
            w -= less
        w *= tl.exp2((scores - shift) * LOG2_E)
        if CONST.MASKED:
            there = j if CONST.ROW_TARGET else position_of(j, CONST)
            same = same_document(
                target_ids + head // H * target_ids_row + at,
                source_ids + head // H * source_ids_row + begin + there,
                CONST,
            )
            w = tl.where(same, w, 0.0)
        if CONST.SUMS:
            total += tl.sum(w, 1)
        moved = key_rows(
            source, first_source + j, CONST.FEATURES, tl.program_id(1) * CONST.OUT, CONST.COLUMNS, CONST.OUT
        )
        acc = tl.dot(w, moved, acc, input_precision=CONST.PRODUCT)
    features = tl.program_id(1) * CONST.OUT + tl.arange(0, CONST.OUT)
    here = out + (first_target + i + rows)[:, None] * CONST.FEATURES + features[None, :]
    tl.store(here, tl.load(here) + alpha * acc)
    if CONST.SUMS and tl.program_id(1) == 0:
        tl.store(sums + (head * pairs + pair) * (tiles * CONST.ROWS) + i + rows, alpha * total)
