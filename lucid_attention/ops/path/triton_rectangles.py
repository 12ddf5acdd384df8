"""Launches of the PaTH kernels: products of the tree, inverses, and the three kernels of rectangles."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..triton_tiles import Precisions, Tile
from . import triton_kernels
from .scores import LEAF
from .triton_configs import PathTileSizes

# Leaves are inverted by forward substitution; larger blocks are put together from them.
BLOCK = LEAF


@dataclass(frozen=True)
class TritonAlgebra:
    """Products of float32 matrices at a precision that no setting of torch can lower; sizes are multiples of 16."""

    tile: Tile
    precision: str

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if a.ndim > 4:
            self._run(None, a.flatten(1, -3), b.flatten(1, -3), out.flatten(1, -3), 1.0, 0.0)
            return out
        return self._run(None, a, b, out, 1.0, 0.0)

    def plus_product(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        return self._run(c.expand_as(out), a, b, out, alpha, 1.0)

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        return self._run(c, a, b, c, alpha, beta)

    def solve_(self, matrix: Tensor, y: Tensor) -> None:
        y.copy_(self.product(self.inverse(matrix), y))

    def solve_transposed_(self, matrix: Tensor, y: Tensor) -> None:
        y.copy_(self.product(self.inverse(matrix).mT, y))

    def inverse(self, matrix: Tensor) -> Tensor:
        """(I + stril matrix)⁻¹: [m, N, N] -> [m, N, N], N = 64 · 2^i. Entries on and above the diagonal are not read."""
        m, N, _ = matrix.shape
        matrix, out = matrix.contiguous(), torch.zeros_like(matrix)
        triton_kernels.path_inverse_kernel[(m * (N // BLOCK),)](matrix, out, SIZE=N, BLOCK=BLOCK, num_warps=4)
        size = BLOCK
        while size < N:
            blocks, inverses = (_diagonal(x, 2 * size).flatten(0, 1) for x in (matrix, out))
            first, last = inverses[:, :size, :size].contiguous(), inverses[:, size:, size:].contiguous()
            corner = self.product(last, self.product(blocks[:, size:, :size].contiguous(), first))
            _diagonal(out, 2 * size)[..., size:, :size] = corner.neg_().unflatten(0, (m, -1))
            size *= 2
        return out

    def _run(self, c: Tensor | None, a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float) -> Tensor:
        (I, K), J, tile = a.shape[-2:], b.shape[-1], self.tile
        first, second, third, fourth = (_Matrix.of(x) for x in (a, b, out if c is None else c, out))
        assert not third.transposed
        assert not fourth.transposed
        outer, inner = fourth.batch
        rows, columns = min(tile.rows, _power(I)), min(tile.cols, _power(J))
        triton_kernels.path_product_kernel[(outer * inner, I // rows, J // columns)](
            a, b, third.x, out, alpha, beta, inner, K, *first.strides, *second.strides, *third.strides,
            *fourth.strides, A_LEADING=first.leading, B_LEADING=second.leading, C_LEADING=third.leading,
            OUT_LEADING=fourth.leading, A_TRANSPOSED=first.transposed, B_TRANSPOSED=second.transposed,
            ADDS=c is not None, ROWS=rows, COLUMNS=columns, DEPTH=min(tile.keys, _power(K)), PRECISION=self.precision,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


def _power(size: int) -> int:
    """The largest power of two that divides a size."""
    return size & -size


def _diagonal(x: Tensor, size: int) -> Tensor:
    """The diagonal blocks of a size: [m, N, N] -> [m, N / size, size, size], a view."""
    blocks = x.shape[1] // size
    return x.view(-1, blocks, size, blocks, size).diagonal(dim1=1, dim2=3).movedim(-1, 1)


@dataclass(frozen=True)
class _Matrix:
    """A batch of matrices in memory: rows, or columns if transposed, follow every `leading` numbers."""

    x: Tensor
    batch: tuple[int, int]
    leading: int
    transposed: bool
    strides: tuple[int, int]

    @staticmethod
    def of(x: Tensor) -> "_Matrix":
        x = x[:, None] if x.ndim == 3 else x
        transposed = x.stride(3) != 1
        leading, dense = (x.stride(3), x.stride(2)) if transposed else (x.stride(2), x.stride(3))
        assert dense == 1, f"a matrix needs rows or columns without gaps, got strides {x.stride()}"
        outer, inner = (0 if x.shape[i] == 1 else x.stride(i) for i in (0, 1))
        assert outer % leading == 0 == inner % leading, f"batches must start where rows do, got strides {x.stride()}"
        return _Matrix(x, (x.shape[0], x.shape[1]), leading, transposed, (outer // leading, inner // leading))


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
    """Launches on rows and keys. sets: how many sets of rows stand in a leaf; heads: H, of a row of the batch."""

    tiles: PathTileSizes
    multiply: Precisions
    heads: int

    def attend_(self, rows: Side, keys: Side, sets: int, y: Tensor, o: Tensor, lse: Tensor) -> None:
        """Put softmax attention over `keys` into o: [n, pairs, R, E'] and lse: [n, pairs, R]."""
        tile = self.tiles.attend
        fresh = lse.new_empty(lse.shape)
        width = min(tile.values, y.shape[3])
        triton_kernels.path_attend_kernel[self._grid(rows, tile, y.shape[3] // width)](
            rows.x, keys.x, y, o, lse, fresh, *self._common(rows, keys, tile, sets), *_strides(y), *_strides(o),
            lse.stride(0), lse.stride(1), *_places(rows, keys), VALUES=y.shape[3], WIDTH=width,
            **self._constants(rows, keys, tile, sets), PRODUCT=self.multiply.values,
        )  # fmt: skip
        lse.copy_(fresh)

    def apply_(
        self, target: Side, source: Side, sets: int, shifts: Tensor, y: Tensor, out: Tensor, alpha: float, *, to_rows: bool
    ) -> None:  # fmt: skip
        """out += alpha · exp(target · sourceᵀ − shifts) · y: [n, pairs, *, E'].

        shifts: [n, pairs, R], of the rows, which are the target if `to_rows`, otherwise the source.
        """
        tile = self.tiles.apply
        width = min(tile.values, y.shape[3])
        arguments = self._common(target, source, tile, sets)
        triton_kernels.path_apply_kernel[self._grid(target, tile, y.shape[3] // width)](
            target.x, source.x, shifts, y, out, *arguments[:3], alpha, *arguments[3:], *_strides(y), *_strides(out),
            shifts.stride(0), shifts.stride(1), *_places(target, source), SHIFT_STRIDE=shifts.stride(2),
            VALUES=y.shape[3], WIDTH=width, ROW_TARGET=to_rows, **self._constants(target, source, tile, sets),
            PRODUCT=self.multiply.values,
        )  # fmt: skip

    def pull_(
        self, target: Side, source: Side, sets: int, shifts: Tensor, along: Tensor | None, left: Tensor, right: Tensor,
        out: Tensor, alpha: float, *, to_rows: bool, sums: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out += alpha · W · source, W = exp(target · sourceᵀ − shifts) ∘ (left · rightᵀ − along): [n, pairs, *, D'].

        left, right: [n, pairs, *, E'], of target and source; shifts, along: [n, pairs, R], of the rows. sums: [n, pairs,
        R] contiguous, written: the sums of alpha · W along the source.
        """
        tile = self.tiles.pull
        features, values = target.x.shape[3], left.shape[3]
        piece = min(tile.out, features)
        arguments = self._common(target, source, tile, sets)
        less, written = shifts if along is None else along, shifts if sums is None else sums
        triton_kernels.path_pull_kernel[self._grid(target, tile, features // piece)](
            target.x, source.x, shifts, less, left, right, out, written, *arguments[:3], alpha, *arguments[3:],
            *_strides(left), *_strides(right), *_strides(out), shifts.stride(0), shifts.stride(1), less.stride(0),
            less.stride(1), *_places(target, source), SHIFT_STRIDE=shifts.stride(2), VALUES=values,
            WIDTH=min(tile.values, values), OUT=piece, ROW_TARGET=to_rows, ALONG=along is not None,
            SUMS=sums is not None, **self._constants(target, source, tile, sets), PRODUCT=self.multiply.values,
        )  # fmt: skip

    def _grid(self, target: Side, tile: Tile, pieces: int) -> tuple[int, int]:
        n, pairs, R, _ = target.x.shape
        return n * pairs * (R // tile.rows), pieces

    def _common(self, target: Side, source: Side, tile: Tile, sets: int) -> list[object]:
        n, pairs, R, _ = target.x.shape
        ids = (target.ids, source.ids) if target.ids is not None and source.ids is not None else (target.x, target.x)
        bounds = target.x if target.bounds is None else target.bounds
        sides = *_strides(target.x), *_strides(source.x)
        return [*ids, bounds, self.heads, pairs, R // tile.rows, source.x.shape[2], *sides]

    def _constants(self, target: Side, source: Side, tile: Tile, sets: int) -> dict[str, object]:
        features = target.x.shape[3]
        return {
            "FEATURES": features, "SETS": sets, "ROWS": tile.rows, "COLUMNS": tile.cols,
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
