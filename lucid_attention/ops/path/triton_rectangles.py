"""Launches of the three kernels of rectangles."""

from dataclasses import dataclass, replace

from torch import Tensor

from ..triton_tiles import Precisions, Tile, registers
from . import triton_kernels
from .triton_configs import PathTileSizes


@dataclass(frozen=True)
class Side:
    """One side of a rectangle.

    x: [n, pairs, R, D'], D' padded; ids: [B, positions] int32, None if all take part in one document; position: of the
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
    """Launches on rows and keys, in leaves of `leaf` positions. heads: H, of a row of the batch.

    sets, in what follows: how many sets of rows stand in a leaf.
    """

    tiles: PathTileSizes
    multiply: Precisions
    heads: int
    leaf: int

    def attend_(self, rows: Side, keys: Side, sets: int, y: Tensor, o: Tensor, lse: Tensor) -> None:
        """Put softmax attention over `keys` into o: [n, pairs, R, E'] and lse: [n, pairs, R]."""
        tile = self.tiles.attend
        fresh = lse.new_empty(lse.shape)
        width = min(tile.values, y.shape[3])
        triton_kernels.path_attend_kernel[self._grid(rows, tile, y.shape[3] // width)](
            rows.x, keys.x, y, o, lse, fresh, *self._common(rows, keys, tile), *_strides(y), *_strides(o),
            lse.stride(0), lse.stride(1), *_places(rows, keys), VALUES=y.shape[3], WIDTH=width,
            **self._constants(rows, keys, tile, sets), PRODUCT=self.multiply.values,
            **registers(triton_kernels.path_attend_kernel, o.device),
        )  # fmt: skip
        lse.copy_(fresh)

    def apply_(
        self, target: Side, source: Side, sets: int, shifts: Tensor, y: Tensor, out: Tensor, alpha: float, *,
        to_rows: bool,
    ) -> None:  # fmt: skip
        """out += alpha · exp(target · sourceᵀ − shifts) · y: [n, pairs, *, E'].

        shifts: [n, pairs, R], of the rows, which are the target if `to_rows`, otherwise the source.
        """
        tile = self.tiles.apply
        width = min(tile.values, y.shape[3])
        arguments = self._common(target, source, tile)
        triton_kernels.path_apply_kernel[self._grid(target, tile, y.shape[3] // width)](
            target.x, source.x, shifts, y, out, *arguments[:3], alpha, *arguments[3:], *_strides(y), *_strides(out),
            shifts.stride(0), shifts.stride(1), *_places(target, source), SHIFT_STRIDE=shifts.stride(2),
            VALUES=y.shape[3], WIDTH=width, ROW_TARGET=to_rows, **self._constants(target, source, tile, sets),
            PRODUCT=self.multiply.values, **registers(triton_kernels.path_apply_kernel, out.device),
        )  # fmt: skip

    def pull_(
        self, target: Side, source: Side, sets: int, shifts: Tensor, along: Tensor | None, left: Tensor, right: Tensor,
        out: Tensor, alpha: float, *, to_rows: bool, sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out += alpha · W · source, W = exp(target · sourceᵀ − shifts) ∘ (left · rightᵀ − along): [n, pairs, *, D'].

        left, right: [n, pairs, *, E'], of target and source; shifts, along: [n, pairs, R], of the rows. sums:
        [n, pairs, R] contiguous, written: the sums of alpha · W along the source.
        """
        tile = self.tiles.pull
        features, values = target.x.shape[3], left.shape[3]
        piece = min(tile.out, features)
        arguments = self._common(target, source, tile)
        less, written = shifts if along is None else along, shifts if sums is None else sums
        triton_kernels.path_pull_kernel[self._grid(target, tile, features // piece)](
            target.x, source.x, shifts, less, left, right, out, written, *arguments[:3], alpha, *arguments[3:],
            *_strides(left), *_strides(right), *_strides(out), shifts.stride(0), shifts.stride(1), less.stride(0),
            less.stride(1), *_places(target, source), SHIFT_STRIDE=shifts.stride(2), VALUES=values,
            WIDTH=min(tile.values, values), OUT=piece, ROW_TARGET=to_rows, ALONG=along is not None,
            SUMS=sums is not None, **self._constants(target, source, tile, sets), PRODUCT=self.multiply.gradient,
            **registers(triton_kernels.path_pull_kernel, out.device),
        )  # fmt: skip

    def _grid(self, target: Side, tile: Tile, pieces: int) -> tuple[int, int]:
        n, pairs, R, _ = target.x.shape
        return n * pairs * (R // tile.rows), pieces

    def _common(self, target: Side, source: Side, tile: Tile) -> list[object]:
        _, pairs, R, _ = target.x.shape
        ids = (target.ids, source.ids) if target.ids is not None and source.ids is not None else (target.x, target.x)
        bounds = target.x if target.bounds is None else target.bounds
        sides = *_strides(target.x), *_strides(source.x)
        return [*ids, bounds, self.heads, pairs, R // tile.rows, source.x.shape[2], *sides]

    def _constants(self, target: Side, source: Side, tile: Tile, sets: int) -> dict[str, object]:
        features = target.x.shape[3]
        return {
            "FEATURES": features, "SETS": sets, "LEAF": self.leaf, "ROWS": tile.rows, "COLUMNS": tile.cols,
            "PIECE": min(tile.keys, features), "MASKED": target.ids is not None and source.ids is not None,
            "PACKED": target.bounds is not None, "PRECISION": self.multiply.keys, "num_warps": tile.warps,
            "num_stages": tile.stages,
        }  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int]:
    """Of heads and pairs, counted in rows."""
    assert x.stride(3) == 1
    assert x.stride(2) == x.shape[3]
    return x.stride(0) // x.shape[3], x.stride(1) // x.shape[3]


def _places(target: Side, source: Side) -> tuple[int, ...]:
    rows = (0, 0)
    if target.ids is not None and source.ids is not None:
        rows = target.ids.stride(0), source.ids.stride(0)
    return *rows, target.position, target.step, source.position, source.step
