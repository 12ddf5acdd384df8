"""The LUCID solve and its gradients as launches of Triton kernels.

Forward: pack, invert all diagonal blocks, then right-looking: solve a chunk, update the rest of its strip; once a strip
is solved, update all later rows in parallel. Backward: the same in reverse order for dv, then one pass for the keys.
The launches depend on shapes only, never on data, and no program waits for another. Nothing T × T is in memory.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .. import packing
from ..triton_tiles import Precisions, Tile, architecture, on_device, padded_size, precisions, registers
from . import triton_gradients, triton_kernels
from .system import System
from .triton_configs import SolveTiles, solve_tiles

PACK_ROWS = 16


@dataclass(frozen=True)
class _Packed:
    """A system, padded: n heads of P positions of which the new ones start at `first`."""

    system: System
    tiles: SolveTiles
    multiply: Precisions
    n: int
    first: int
    P: int
    features: int
    values: int
    keys: Tensor
    rnorm: Tensor
    inverse: Tensor
    weights: Tensor
    documents: Tensor
    sharpness: Tensor

    @property
    def chunk_count(self) -> int:
        return (self.P - self.first) // self.tiles.chunk

    def value_buffer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.keys.new_empty(self.n, self.P, self.values, dtype=dtype)

    def pack_values(self, x: Tensor | None, out: Tensor, past: bool) -> None:
        """Copy x [B, H, *, E] to its places among the past or the new positions of `out`; None: zeros."""
        low, high = (0, self.first) if past else (self.first, self.P)
        if low == high:
            return
        if x is None:
            out[:, low:high] = 0
            return
        piece = min(64, self.values)
        _pack(
            triton_kernels.pack_values_kernel, self.system, x, (out,), low, high, past,
            (triton.cdiv(self.values, piece),), E=x.shape[3], VALUES=self.values, PIECE=piece,
        )  # fmt: skip


def _pack(
    kernel: triton.JITFunction, system: System, x: Tensor, outs: tuple[Tensor, ...], low: int, high: int, past: bool,
    more: tuple[int, ...], **sizes: int,
) -> None:  # fmt: skip
    x = x if x.stride(-1) == 1 else x.contiguous()
    (B, H, length, _), S = x.shape, system.past_length
    mask = system.key_mask
    if mask is not None:
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)[:, 0 if past else S :]
    tiles = (high - low) // PACK_ROWS
    kernel[(B * H * tiles, *more)](
        x, outs[0] if mask is None else mask, *outs, H, x.stride(0), x.stride(1), x.stride(2),
        0 if mask is None else mask.stride(0), length, high - length if past else low, low, tiles, outs[0].shape[1],
        **sizes, ROWS=PACK_ROWS, MASKED=mask is not None, num_warps=4, **registers(kernel, x.device),
    )  # fmt: skip


def _packed(system: System, v: Tensor, tiles: SolveTiles | None) -> _Packed:
    (*heads, T, D), S = system.k.shape, system.past_length
    n = math.prod(heads)
    dtype = system.k.dtype if system.k_past is None else torch.promote_types(system.k.dtype, system.k_past.dtype)
    dtype_of_all = torch.promote_types(dtype, v.dtype)
    where = architecture(system.k.device)
    features = padded_size(D)
    tiles = tiles or solve_tiles(where, dtype_of_all, features, padded_size(v.shape[3]))
    values = max(padded_size(v.shape[3]), tiles.update.values)
    first = triton.cdiv(S, tiles.chunk) * tiles.chunk
    P = first + triton.cdiv(T, tiles.chunk) * tiles.chunk
    new = system.k.new_empty
    keys = new(n, P, features, dtype=dtype)
    rnorm, inverse = new(n, P, dtype=torch.float32), new(n, P, dtype=torch.float32)
    sizes = {"D": D, "FEATURES": features}
    for k, low, high in ((system.k_past, 0, first), (system.k, first, P)):
        if k is not None:
            outs = keys, rnorm, inverse
            _pack(triton_kernels.pack_keys_kernel, system, k, outs, low, high, k is system.k_past, (), **sizes)
    c = system.sharpness
    c = c.reshape(n).float().contiguous() if isinstance(c, Tensor) else rnorm.new_full((n,), c)
    weights, documents = _weights(system, n, first, P), _documents(system, P)
    return _Packed(
        system, tiles, precisions(where, dtype_of_all), n, first, P, features, values,
        keys, rnorm, inverse, weights, documents, c,
    )  # fmt: skip


def _weights(system: System, n: int, first: int, P: int) -> Tensor:
    B, H, T, _ = system.k.shape
    weights = system.k.new_zeros(B, H, P, dtype=torch.float32)
    new = weights[:, :, first : first + T]
    new.copy_(system.beta) if system.beta is not None else new.fill_(1)
    if system.key_mask is not None:
        new.masked_fill_(~system.key_mask[:, None, system.past_length :], 0)
    return weights.view(n, P)


def _documents(system: System, P: int) -> Tensor:
    """[2, P], `packing.document_bounds`; empty without packed documents."""
    if system.cu_seqlens is None:
        return system.k.new_empty(0, dtype=torch.int32)
    return packing.document_bounds(system.cu_seqlens, system.k.shape[2], P, system.k.device)


class _Sweep:
    """The launches of one sweep over the chunks of a packed system."""

    def __init__(self, packed: _Packed, adjoint: bool) -> None:
        self.packed, self.adjoint = packed, adjoint
        self.has_documents = packed.documents.numel() > 0
        self.chunks = self._inverses()

    def _system(self, kernel: triton.JITFunction, tile: Tile) -> dict[str, object]:
        p = self.packed
        return {
            "strength": p.system.strength, "P": p.P, "FEATURES": p.features, "PIECE": min(tile.keys, p.features),
            "PACKED": self.has_documents, "PRECISION": p.multiply.keys, "num_warps": tile.warps,
            "num_stages": tile.stages, **registers(kernel, p.keys.device),
        }  # fmt: skip

    def _inverses(self) -> Tensor:
        p, block = self.packed, self.packed.tiles.block
        count = p.chunk_count
        chunks = p.keys.new_empty(p.n, count, 2 * block, 2 * block, dtype=torch.float32)
        tensors = p.keys, p.rnorm, p.weights, p.documents, p.sharpness, chunks
        sizes = {"first": p.first, "BLOCK": block, "ADJOINT": self.adjoint}
        triton_kernels.inverse_kernel[(p.n * 2 * count,)](
            *tensors, tiles=2 * count, **sizes, **self._system(triton_kernels.inverse_kernel, p.tiles.inverse)
        )
        columns = min(p.tiles.merge.cols, block)
        triton_kernels.merge_kernel[(p.n * count, block // columns)](
            *tensors, tiles=count, COLUMNS=columns, INVERSE=p.multiply.inverse, **sizes,
            **self._system(triton_kernels.merge_kernel, p.tiles.merge),
        )  # fmt: skip
        return chunks

    def update(self, solved: Tensor, residuals: Tensor, targets: tuple[int, int], source: tuple[int, int]) -> None:
        """Positions [targets) against [source)."""
        p, tile = self.packed, self.packed.tiles.update
        count = (targets[1] - targets[0]) // tile.rows
        if count <= 0 or source[0] >= source[1]:
            return
        triton_kernels.update_kernel[(p.n * count, p.values // tile.values)](
            p.keys, p.rnorm, p.documents, p.sharpness, solved, residuals, first=targets[0], tiles=count,
            source=source[0], source_end=source[1], VALUES=p.values, ROWS=tile.rows, COLUMNS=tile.cols,
            WIDTH=tile.values, PRODUCT=p.multiply.values, **self._system(triton_kernels.update_kernel, tile),
        )  # fmt: skip

    def solve(
        self, chunk: int, residuals: Tensor, solved: Tensor, out: Tensor, z: Tensor | None, products: Tensor | None
    ) -> None:
        p, tile = self.packed, self.packed.tiles.solve
        triton_kernels.solve_kernel[(p.n * 2, p.values // tile.values)](
            self.chunks, residuals, p.weights, solved, out, out if z is None else z,
            out if products is None else products, chunk, p.chunk_count, p.first, out.shape[2], p.P, E=out.shape[3],
            VALUES=p.values, BLOCK=p.tiles.block, COLUMNS=tile.values, INNER=tile.cols, ADJOINT=self.adjoint,
            BETA=z is not None, INVERSE=p.multiply.inverse, num_warps=tile.warps, num_stages=tile.stages,
            **registers(triton_kernels.solve_kernel, out.device),
        )  # fmt: skip

    def run(self, residuals: Tensor, solved: Tensor, out: Tensor, z: Tensor | None, products: Tensor | None) -> None:
        p, chunk, strip = self.packed, self.packed.tiles.chunk, self.packed.tiles.strip
        strips = list(range(p.first, p.P, strip))
        for low in reversed(strips) if self.adjoint else strips:
            high = min(low + strip, p.P)
            starts = list(range(low, high, chunk))
            for start in reversed(starts) if self.adjoint else starts:
                self.solve((start - p.first) // chunk, residuals, solved, out, z, products)
                rest = (low, start) if self.adjoint else (start + chunk, high)
                self.update(solved, residuals, rest, (start, start + chunk))
            self.update(solved, residuals, (0, low) if self.adjoint else (high, p.P), (low, high))


def forward(system: System, v: Tensor, y: Tensor, z: Tensor | None, tiles: SolveTiles | None = None) -> None:
    """Write y [B, H, T, E] and, where it is asked for, z [B, H, T, E], both contiguous."""
    with on_device(v):
        packed = _packed(system, v, tiles)
        residuals, solved = packed.value_buffer(), packed.value_buffer()
        packed.pack_values(v, residuals, past=False)
        packed.pack_values(system.y_past, solved, past=True)
        sweep = _Sweep(packed, adjoint=False)
        sweep.update(solved, residuals, (packed.first, packed.P), (0, packed.first))
        sweep.run(residuals, solved, y, z, None)


@dataclass(frozen=True)
class Gradients:
    """Contiguous buffers for the gradients, shaped as what they belong to; None where a gradient is not asked for."""

    dv: Tensor
    dk: Tensor | None
    dk_past: Tensor | None
    dy_past: Tensor | None
    dbeta: Tensor | None
    dsharpness: Tensor | None


def backward(
    system: System, dy: Tensor, y: Tensor, z: Tensor | None, out: Gradients, tiles: SolveTiles | None = None
) -> None:
    """Write all gradients that have a buffer in `out`. dk is needed for dk_past and dsharpness."""
    with on_device(dy):
        packed = _packed(system, y, tiles)
        residuals, g = packed.value_buffer(), packed.value_buffer()
        packed.pack_values(dy, residuals, past=False)
        packed.pack_values(None, residuals, past=True)
        products = None
        if z is not None:
            pieces = packed.values // packed.tiles.solve.values
            products = dy.new_empty(packed.n, pieces, dy.shape[2], dtype=torch.float32)
        _Sweep(packed, adjoint=True).run(residuals, g, out.dv, z, products)
        if out.dbeta is not None and products is not None:
            out.dbeta.copy_(system.zero_masked(products.sum(1).view(out.dbeta.shape)))
        if out.dy_past is not None:
            past = residuals[:, packed.first - system.past_length : packed.first, : dy.shape[3]]
            past = past.reshape(out.dy_past.shape)
            if system.key_mask is not None:
                past = past.masked_fill(~system.key_mask[:, None, : system.past_length, None], 0)
            out.dy_past.copy_(past)
        if out.dk is not None:
            _key_gradients(packed, y, g, out)


def _key_gradients(packed: _Packed, y: Tensor, g: Tensor, out: Gradients) -> None:
    p, tile, system = packed, packed.tiles.gradient, packed.system
    assert out.dk is not None
    values = p.value_buffer(y.dtype if system.y_past is None else torch.promote_types(y.dtype, system.y_past.dtype))
    p.pack_values(y, values, past=False)
    p.pack_values(system.y_past, values, past=True)
    p.pack_values(None, g, past=True)
    du, row_sums = p.keys.new_empty(p.keys.shape, dtype=torch.float32), p.rnorm.new_empty(p.rnorm.shape)
    count = p.P // tile.rows
    width = min(tile.out, p.features)
    triton_gradients.key_gradient_kernel[(p.n * count, p.features // width)](
        p.keys, p.rnorm, p.documents, p.sharpness, values, g, du, row_sums, system.strength, p.first, count, p.P,
        FEATURES=p.features, PIECE=min(tile.keys, p.features), OUT=width, VALUES=p.values,
        WIDTH=min(tile.values, p.values), ROWS=tile.rows, COLUMNS=tile.cols, PACKED=p.documents.numel() > 0,
        PRECISION=p.multiply.keys, PRODUCT=p.multiply.values, GRADIENT=p.multiply.gradient, num_warps=tile.warps,
        num_stages=tile.stages, **registers(triton_gradients.key_gradient_kernel, y.device),
    )  # fmt: skip
    if out.dsharpness is not None:
        out.dsharpness.copy_(row_sums[:, p.first :].sum(1).view(out.dsharpness.shape))
    past = p.first - system.past_length
    for dk, low, high, offset in ((out.dk_past, 0, p.first, past), (out.dk, p.first, p.P, p.first)):
        if dk is not None:
            tiles = (high - low) // PACK_ROWS
            triton_gradients.project_kernel[(p.n * tiles,)](
                p.keys, p.rnorm, p.inverse, du, dk, low, offset, tiles, dk.shape[2], p.P, D=dk.shape[3],
                FEATURES=p.features, ROWS=PACK_ROWS, num_warps=8,
                **registers(triton_gradients.project_kernel, dk.device),
            )  # fmt: skip
