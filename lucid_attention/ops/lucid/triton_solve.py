"""The LUCID solve and its gradients by Triton kernels: tile sizes, kernels, then their launches.

Forward: pack, invert all diagonal blocks of 512 rows (strips), then right-looking: one product with its inverse solves
a strip, then all later rows are updated in parallel. Backward: the same in reverse order for dv, then one pass for the
keys. The launches depend on shapes only, never on data, and no program waits for another. Nothing T × T is in memory.

Everything is padded: n heads of P positions, those of the past first and right-aligned, so that the new ones start at
a multiple of a chunk. Keys are [n, P, D'], values [n, P, E'], D' and E' padded as well, so only the kernels at the
border (`pack_*`, `solve_kernel` where it writes results) need masks. Padding and masked positions have zero keys, zero
values and weight 0: they take no part.

    z = v − s L y,   y = w ∘ z,   L_ij = exp(c (cos θ_ij − 1)) for j < i in the same document

w is β, or 1, and 0 at masked positions. What is inverted is I + s L diag(w), or I + s diag(w) L for the adjoint.

For 16-bit inputs keys are kept in float16, which is exact, and so is a solved y: a product with it is two, with the
halves of L in float16. An error of y enters the result at most doubled, however long the sequence
(`docs/mathematics.md`): less than what bfloat16 rounds. For float16 inputs a third product adds what y lost. So that
neither overflows, every column of the values is scaled by a power of two to a largest entry between 1 and 2, and L by
2^15.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import packing
from ..triton_products import TritonAlgebra
from ..triton_tiles import (
    LOG2_E,
    PRODUCT_TILE,
    Precisions,
    Tile,
    architecture,
    exact_dot,
    exponentials,
    key_columns,
    key_rows,
    on_device,
    padded_size,
    precisions,
    registers,
    score_tile,
    stride_unit,
)
from .system import Gradients, System

PACK_ROWS = 16
# Memory that inverses of strips may take.
INVERSE_BYTES = 256 * 1024**2
# The power of two by which L is scaled before it becomes float16.
SCALED = tl.constexpr(15)
# Brings a gradient times the inverse norm of a scaled key, at most 2^-8, into the range of float16
# (`docs/mathematics.md`, section 3).
NORMAL = tl.constexpr(4.0)


@dataclass(frozen=True)
class SolveTiles:
    """block: rows of a tile of an inverse; positions are padded to a multiple of chunk; strip: the most rows that are
    solved at once."""

    inverse: Tile
    product: Tile
    solve: Tile
    update: Tile
    gradient: Tile
    block: int = 64
    chunk: int = 128
    strip: int = 512


def solve_tiles(architecture: str, dtype: torch.dtype, features: int, values: int) -> SolveTiles:
    """One configuration per architecture and shape class. Each compiles without spills (`make test-gpu-offline`).

    dtype: the wider one of keys and values; features, values: the padded head sizes. The large tiles are for the
    architectures where matrix instructions need them, and none had wrong results with 8 warps.
    """
    width, exact = min(128, values), dtype == torch.float32
    usual = not exact and max(features, values) <= 128
    large = architecture in ("sm_80", "sm_90") and usual
    whole = 32 if exact else features
    # Whole keys leave less room for values; only here it is too little.
    narrow = architecture == "sm_120" and whole >= 128
    columns = 64 if architecture == "sm_100" and usual else 32
    update = Tile(64, columns, min(64, width) if narrow else width, whole)
    # The piece of the values in flight: what packed documents need to spill nothing.
    gradient = Tile(32, 32, 32 if exact else 16, min(whole, 64), out=64 if features <= 128 else 32)
    if dtype == torch.bfloat16:
        gradient = Tile(64, 32, min(64, values), features) if usual else Tile(32, 32, 64, 64, out=features)
        if large:
            gradient = Tile(128, 32 if architecture == "sm_80" or features + values > 128 else 64, values, whole, 8, 3)
    if large:
        update = Tile(128, 64 if architecture == "sm_90" else 32, width, whole, warps=8, stages=3)
    return SolveTiles(
        inverse=Tile(64, 64, width, 32, warps=8 if architecture == "sm_100" else 4),
        product=PRODUCT_TILE,
        solve=Tile(64, 32, min(32, values) if exact else max(16, min(64, values // 2)), 0),
        update=update,
        gradient=gradient,
    )


class PaddedSystem(NamedTuple):
    """A padded system, as kernels read it. Contiguous.

    keys: [n, P, D'], each scaled by a power of two; rnorm, inverse: [n, P], 1/‖·‖ of the scaled key and of the key
    itself; weights: [n, P], w; documents: [2, P], where the document of a position starts and ends, empty without
    packed documents; sharpness: [n], c; strength: s.
    """

    keys: Tensor
    rnorm: Tensor
    inverse: Tensor
    weights: Tensor
    documents: Tensor
    sharpness: Tensor
    strength: float


class Constants(NamedTuple):
    """What a kernel is compiled for. Fields that a kernel does not read keep their default.

    FEATURES, VALUES: D' and E'. PIECE: of D', multiplied at a time; WIDTH: of E', likewise; OUT: of D', written by one
    program. PACKED: whether there are documents. LOWER: whether solutions have a lower half. SHARPNESS: whether its
    gradient is asked for. PRECISION: of products of float32; INVERSE: of an inverse with residuals.
    """

    FEATURES: int = 0
    PIECE: int = 0
    OUT: int = 0
    VALUES: int = 0
    WIDTH: int = 0
    ROWS: int = 0
    COLUMNS: int = 0
    BLOCK: int = 0
    ADJOINT: bool = False
    BETA: bool = False
    PACKED: bool = False
    LOWER: bool = False
    SHARPNESS: bool = False
    PRECISION: str = ""
    INVERSE: str = ""


@triton.jit
def read_source(x, mask, strides, length, H, head, positions, columns, CONST: tl.constexpr):
    """Positions and columns of a head of x: [B, H, length, SIZE], zero outside and where the mask is 0.

    strides: of batch, heads and positions in x, in multiples of UNIT, and of the batch in the mask.
    """
    batch = head // H
    inside = (positions >= 0) & (positions < length)
    if CONST.MASKED:
        inside &= tl.load(mask + batch * strides[3] + positions, mask=inside, other=0) != 0
    start = x + (batch * strides[0] + (head % H) * strides[1]) * CONST.UNIT
    there = start + (positions.to(tl.int64) * strides[2] * CONST.UNIT)[:, None] + columns[None, :]
    return tl.load(there, mask=inside[:, None] & (columns < CONST.SIZE)[None, :], other=0.0).to(tl.float32)


class PackConstants(NamedTuple):
    """SIZE: of the source; PADDED: of the result; PIECE: of it, copied by a program; UNIT: as in `stride_unit`."""

    SIZE: int
    PADDED: int
    PIECE: int
    UNIT: int
    ROWS: int
    MASKED: bool


SOURCE = ["H", "stride_b", "stride_h", "stride_t", "stride_mask", "length", "offset", "first", "tiles", "P"]


@triton.jit(do_not_specialize=SOURCE, do_not_specialize_on_alignment=["mask"])
def pack_keys_kernel(
    k, mask, keys, rnorm, inverse, H, stride_b, stride_h, stride_t, stride_mask, length, offset, first, tiles, P,
    CONST: tl.constexpr,
):  # fmt: skip
    """Copy keys, each scaled by a power of two to a largest entry of 256 to 511, so that products neither overflow nor
    vanish; rnorm: 1/‖·‖ of the scaled key, inverse: 1/‖·‖ of the key itself. Both are 0 for a zero key.

    Padded rows [first, first + tiles · ROWS); row r is position r − offset of `length`.
    """
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * CONST.ROWS + tl.arange(0, CONST.ROWS)
    columns = tl.arange(0, CONST.PADDED)
    strides = (stride_b, stride_h, stride_t, stride_mask)
    x = read_source(k, mask, strides, length, H, head, rows - offset, columns, CONST)
    exponent = (tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23) & 255
    scale = (tl.minimum(tl.maximum(262 - exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    # Below the smallest normal number a key counts as zero, as in the other implementations.
    scaled = tl.where((exponent > 0)[:, None], x * scale[:, None], 0.0)
    # The error of a norm is that of a whole row and column of P: it is computed in float64, and rounded once.
    wide = scaled.to(tl.float64)
    squares = tl.sum(wide * wide, 1)
    reciprocal = tl.where(squares > 0, 1.0 / tl.sqrt(tl.where(squares > 0, squares, 1.0)), 0.0)
    # NaN must not turn into a zero key.
    reciprocal = tl.where(squares == squares, reciprocal, squares).to(tl.float32)
    here = head * P + rows
    tl.store(keys + here[:, None] * CONST.PADDED + columns[None, :], scaled.to(keys.dtype.element_ty))
    tl.store(rnorm + here, reciprocal)
    tl.store(inverse + here, reciprocal * scale)


@triton.jit(do_not_specialize=SOURCE, do_not_specialize_on_alignment=["mask"])
def pack_values_kernel(
    v, mask, values, scales, H, stride_b, stride_h, stride_t, stride_mask, length, offset, first, tiles, P,
    CONST: tl.constexpr,
):  # fmt: skip
    """Copy values times scales [n, PADDED]; zeros at padding and masked positions. Rows as in `pack_keys_kernel`."""
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    rows = first + (pid % tiles) * CONST.ROWS + tl.arange(0, CONST.ROWS)
    columns = tl.program_id(1) * CONST.PIECE + tl.arange(0, CONST.PIECE)
    strides = (stride_b, stride_h, stride_t, stride_mask)
    x = read_source(v, mask, strides, length, H, head, rows - offset, columns, CONST)
    x *= tl.load(scales + head * CONST.PADDED + columns)[None, :]
    out = values + (head * P + rows)[:, None] * CONST.PADDED + columns[None, :]
    tl.store(out, x.to(values.dtype.element_ty))


@triton.jit
def cosine_tile(system, base, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONST: tl.constexpr):
    """cos θ between ROWS positions from `row` and COLUMNS positions from `column` of a head: [ROWS, COLUMNS].

    base: the head's first row in `keys`, int64.
    """
    cosines = score_tile(
        system.keys, base + row, system.keys, base + column, ROWS, COLUMNS, CONST.FEATURES, CONST.PIECE,
        CONST.PRECISION,
    )  # fmt: skip
    left = tl.load(system.rnorm + base + row + tl.arange(0, ROWS))
    right = tl.load(system.rnorm + base + column + tl.arange(0, COLUMNS))
    return cosines * left[:, None] * right[None, :]


@triton.jit
def same_document(system, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left = tl.load(system.documents + row + tl.arange(0, ROWS))
    return left[:, None] == tl.load(system.documents + column + tl.arange(0, COLUMNS))[None, :]


@triton.jit(do_not_specialize=["first", "tiles", "sixteenths", "P"])
def blocks_kernel(system, matrices, first, tiles, sixteenths, P, CONST: tl.constexpr):
    """s L diag(w), or s diag(w) L for the adjoint, of strips of 16 · `sixteenths` rows from `first` on.

    matrices: [n, strips, rows, rows], zero on and above the diagonal; tiles above it and after P are not written.
    tiles: of BLOCK rows of all strips.
    """
    BLOCK: tl.constexpr = CONST.BLOCK
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    row = first + (pid % tiles) * BLOCK
    size = sixteenths * 16
    local = (pid % tiles) * BLOCK % size
    column = row - local + tl.program_id(1) * BLOCK
    base = head * P
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK)
    if (column <= row) & (row < P):
        cosines = cosine_tile(system, base, row, column, BLOCK, BLOCK, CONST)
        tile = exponentials(cosines, tl.load(system.sharpness + head))
        if CONST.PACKED:
            tile = tl.where(same_document(system, row, column, BLOCK, BLOCK), tile, 0.0)
        if CONST.ADJOINT:
            tile *= (tl.load(system.weights + base + row + rows) * system.strength)[:, None]
        else:
            tile *= (tl.load(system.weights + base + column + columns) * system.strength)[None, :]
        tile = tl.where((row + rows)[:, None] > (column + columns)[None, :], tile, 0.0)
        start = matrices + (head * tiles * BLOCK + (pid % tiles) * BLOCK) * size + tl.program_id(1) * BLOCK
        tl.store(start + rows[:, None] * size + columns[None, :], tile)


@triton.jit(do_not_specialize=["index", "strips", "sixteenths", "start", "tiles", "first", "length", "P"])
def solve_kernel(
    weights, scales, inverses, residuals, solved, lower, out, z, products, index, strips, sixteenths, start, tiles,
    first, length, P, E: tl.constexpr, CONST: tl.constexpr,
):  # fmt: skip
    """Solve a strip whose residuals are complete: y = w ∘ z with z = X · residuals (Xᵀ for the adjoint).

    inverses: [n, strips, rows, rows], X of the strip is at `index`; its rows are [start, start + tiles · BLOCK).
    Written twice: to `solved` [n, P, E'] for later updates (LOWER: what float16 cuts off, to `lower`), and to `out`
    [n, T, E], without the scales. With BETA z is written as well; the adjoint, whose z is the gradient t of the
    right-hand side, reads z and writes t·z of every row and piece of E.
    """
    BLOCK: tl.constexpr = CONST.BLOCK
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    row = (pid % tiles) * BLOCK
    size = sixteenths * 16
    rows = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
    inner = tl.arange(0, CONST.COLUMNS)
    matrix = inverses + (head * strips + index) * size * size
    base = head * P + start
    acc = tl.zeros((BLOCK, CONST.WIDTH), tl.float32)
    for i in range(row if CONST.ADJOINT else 0, tiles * BLOCK if CONST.ADJOINT else row + BLOCK, CONST.COLUMNS):
        if CONST.ADJOINT:
            x = tl.load(matrix + (row + rows)[:, None] + (i + inner)[None, :] * size)
        else:
            x = tl.load(matrix + (row + rows)[:, None] * size + (i + inner)[None, :])
        y = tl.load(residuals + (base + i + inner)[:, None] * CONST.VALUES + columns[None, :])
        acc = tl.dot(x, y, acc, input_precision=CONST.INVERSE)
    here = base + row + rows
    w = tl.load(weights + here)[:, None]
    y = acc * w
    rounded = y.to(solved.dtype.element_ty)
    tl.store(solved + here[:, None] * CONST.VALUES + columns[None, :], rounded)
    if CONST.LOWER:
        rest = (y - rounded.to(tl.float32)).to(tl.float16)
        tl.store(lower + here[:, None] * CONST.VALUES + columns[None, :], rest)
    acc /= tl.load(scales + head * CONST.VALUES + columns)[None, :]
    position = start - first + row + rows
    inside = (position < length)[:, None] & (columns < E)[None, :]
    there = (head * length + position)[:, None] * E + columns[None, :]
    tl.store(out + there, (acc * w).to(out.dtype.element_ty), mask=inside)
    if CONST.BETA:
        if CONST.ADJOINT:
            product = tl.sum(acc * tl.load(z + there, mask=inside, other=0.0).to(tl.float32), 1)
            piece = (head * tl.num_programs(1) + tl.program_id(1)) * length + position
            tl.store(products + piece, product, mask=position < length)
        else:
            tl.store(z + there, acc.to(z.dtype.element_ty), mask=inside)


@triton.jit
def resident_rows(x, first, ROWS: tl.constexpr, FEATURES: tl.constexpr, PIECE: tl.constexpr):
    """Rows that a program keeps for all of its tiles: all features, if they fit, otherwise none."""
    rows = first
    if PIECE == FEATURES:
        rows = key_rows(x, first, FEATURES, 0, ROWS, FEATURES)
    return rows


@triton.jit
def resident_scores(
    kept, left, row, right, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
    PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """left[rows] · right[columns]ᵀ, as `score_tile`; kept: `resident_rows` of left."""
    if PIECE == FEATURES:
        columns = key_columns(right, column, FEATURES, 0, COLUMNS, FEATURES)
        scores = tl.dot(kept, columns, input_precision=PRECISION)
    else:
        scores = score_tile(left, row, right, column, ROWS, COLUMNS, FEATURES, PIECE, PRECISION)
    return scores


@triton.jit(do_not_specialize=["first", "tiles", "source", "source_end", "P"])
def update_kernel(system, solved, lower, residuals, first, tiles, source, source_end, P, CONST: tl.constexpr):
    """residuals[target] −= s L[target, source] · solved[source], for all targets in tiles of ROWS.

    Targets are after the source or, for the adjoint, before it: what L is made of is symmetric. lower: what float16 cut
    off from `solved`, with LOWER.
    """
    ROWS: tl.constexpr = CONST.ROWS
    COLUMNS: tl.constexpr = CONST.COLUMNS
    # In float32 nothing is scaled.
    SHIFT: tl.constexpr = SCALED if solved.dtype.element_ty == tl.float16 else 0
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    target = first + (pid % tiles) * ROWS
    base = head * P
    if CONST.PACKED:
        # A document's columns end, or begin, where it does.
        if target >= source_end:
            source = tl.maximum(source, tl.load(system.documents + target) // COLUMNS * COLUMNS)
        else:
            source_end = tl.minimum(source_end, tl.load(system.documents + P + target + ROWS - 1))
    if source < source_end:
        c = tl.load(system.sharpness + head) * LOG2_E
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        wide = tl.program_id(1) * CONST.WIDTH + tl.arange(0, CONST.WIDTH)
        row_norms = tl.load(system.rnorm + base + target + rows)[:, None]
        row_keys = resident_rows(system.keys, base + target, ROWS, CONST.FEATURES, CONST.PIECE)
        if CONST.PACKED:
            row_documents = tl.load(system.documents + target + rows)[:, None]
        acc = tl.zeros((ROWS, CONST.WIDTH), tl.float32)
        for j in range(source, source_end, COLUMNS):
            scores = resident_scores(
                row_keys, system.keys, base + target, system.keys, base + j, ROWS, COLUMNS, CONST.FEATURES, CONST.PIECE,
                CONST.PRECISION,
            )  # fmt: skip
            scores *= row_norms * tl.load(system.rnorm + base + j + columns)[None, :]
            tile = tl.exp2((scores - 1.0) * c + SHIFT)
            if CONST.PACKED:
                tile = tl.where(row_documents == tl.load(system.documents + j + columns)[None, :], tile, 0.0)
            there = (base + j + columns)[:, None] * CONST.VALUES + wide[None, :]
            acc = exact_dot(tile, tl.load(solved + there), acc, CONST.PRECISION)
            if CONST.LOWER:
                acc = tl.dot(tile.to(tl.float16), tl.load(lower + there), acc)
        here = residuals + (base + target + rows)[:, None] * CONST.VALUES + wide[None, :]
        tl.store(here, tl.load(here) - (system.strength / 2**SHIFT) * acc)


@triton.jit
def column_product(system, w, acc, base, j, CONST: tl.constexpr):
    """acc + NORMAL · w · diag(1/‖k‖) k, for the piece of the head size that this program writes."""
    w *= tl.load(system.rnorm + base + j + tl.arange(0, CONST.COLUMNS))[None, :] * NORMAL
    k = key_rows(system.keys, base + j, CONST.FEATURES, tl.program_id(1) * CONST.OUT, CONST.COLUMNS, CONST.OUT)
    if CONST.LOWER or k.dtype == tl.float32:
        acc = exact_dot(w, k, acc, CONST.PRECISION)
    else:
        acc = tl.dot(w.to(tl.float16), k, acc)
    return acc


@triton.jit
def gradient_tile(
    system, left, right, lower_left, lower_right, row_keys, row_left, row_lower, c, base, target, j,
    CONST: tl.constexpr,
):  # fmt: skip
    """L ∘ (left · rightᵀ) and cos θ − 1 between rows at `target` and columns at `j`: twice [ROWS, COLUMNS].

    Either left or right is g, whose lower half is another tensor with LOWER; the other one has none. The tensors of
    rows are `resident_rows`.
    """
    ROWS: tl.constexpr = CONST.ROWS
    COLUMNS: tl.constexpr = CONST.COLUMNS
    scores = resident_scores(
        row_keys, system.keys, base + target, system.keys, base + j, ROWS, COLUMNS, CONST.FEATURES, CONST.PIECE,
        CONST.PRECISION,
    )  # fmt: skip
    row_norms = tl.load(system.rnorm + base + target + tl.arange(0, ROWS))[:, None]
    scores *= tl.load(system.rnorm + base + j + tl.arange(0, COLUMNS))[None, :]
    w = resident_scores(
        row_left, left, base + target, right, base + j, ROWS, COLUMNS, CONST.VALUES, CONST.WIDTH, CONST.PRECISION
    )  # fmt: skip
    if CONST.LOWER:
        w += resident_scores(
            row_lower, lower_left, base + target, lower_right, base + j, ROWS, COLUMNS, CONST.VALUES, CONST.WIDTH,
            CONST.PRECISION,
        )  # fmt: skip
    # As `exponentials`, with fewer instructions for an element.
    w *= tl.exp2(scores * (row_norms * (c * LOG2_E)) - c * LOG2_E)
    if CONST.PACKED:
        w = tl.where(same_document(system, target, j, ROWS, COLUMNS), w, 0.0)
    return w, scores * row_norms - 1.0


@triton.jit(do_not_specialize=["first_new", "tiles", "P"])
def key_gradient_kernel(
    system, values, gradients, lower, units, du, row_sums, first_new, tiles, P, CONST: tl.constexpr
):
    """du of a tile of positions, from the columns before them and the rows after them; every tile is made again.

    With W_ij = −s L_ij (g_i · y_j) for j < i, where g = dv, and u = k/‖k‖:

        du_p = c Σ_{j<p} W_pj u_j + c Σ_{i>p} W_ip u_i,   dc = Σ W (cos θ − 1)

    gradients, lower: g, zero in the past, and what float16 cuts off. units: [n], by which g · y is scaled. du:
    [n, P, D'], divided by ‖k‖; it is the gradient of the key if one program writes whole rows. row_sums: [n, P], the
    terms of dc by row.
    """
    ROWS: tl.constexpr = CONST.ROWS
    COLUMNS: tl.constexpr = CONST.COLUMNS
    pid = tl.program_id(0)
    head = (pid // tiles).to(tl.int64)
    target = (pid % tiles) * ROWS
    base = head * P
    c = tl.load(system.sharpness + head)
    factor = -system.strength / tl.load(units + head)
    rows = target + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    row_keys = resident_rows(system.keys, base + target, ROWS, CONST.FEATURES, CONST.PIECE)
    low = 0
    high = P
    if CONST.PACKED:
        low = tl.load(system.documents + target) // COLUMNS * COLUMNS
        high = tl.load(system.documents + P + target + ROWS - 1)
    # Rows of the past belong to no equation here.
    own = (target >= first_new).to(tl.int32) * ROWS
    sums = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, CONST.OUT), tl.float32)
    row_g = resident_rows(gradients, base + target, ROWS, CONST.VALUES, CONST.WIDTH)
    row_lower = resident_rows(lower, base + target, ROWS, CONST.VALUES, CONST.WIDTH)
    # On the diagonal, a tile has columns before and after a row.
    for diagonal in tl.static_range(2):
        begin = target if diagonal else low
        for j in range(begin, target + own if diagonal else tl.where(own > 0, target, low), COLUMNS):
            w, below_one = gradient_tile(
                system, gradients, values, lower, values, row_keys, row_g, row_lower, c, base, target, j, CONST
            )  # fmt: skip
            w = tl.where(j + columns < rows, w, 0.0) if diagonal else w
            if CONST.SHARPNESS:
                sums += tl.sum(w * below_one, 1)
            acc = column_product(system, w, acc, base, j, CONST)
    row_y = resident_rows(values, base + target, ROWS, CONST.VALUES, CONST.WIDTH)
    for diagonal in tl.static_range(2):
        begin = target if diagonal else tl.maximum(target + ROWS, first_new)
        for j in range(begin, target + own if diagonal else high, COLUMNS):
            w, _ = gradient_tile(
                system, values, gradients, values, lower, row_keys, row_y, row_y, c, base, target, j, CONST
            )  # fmt: skip
            w = tl.where(j + columns > rows, w, 0.0) if diagonal else w
            acc = column_product(system, w, acc, base, j, CONST)
    here = base + target + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        tl.store(row_sums + here, factor * sums)
    features = tl.program_id(1) * CONST.OUT + tl.arange(0, CONST.OUT)
    if CONST.OUT == CONST.FEATURES:
        # Only the part across u reaches the key.
        u = key_rows(system.keys, base + target, CONST.FEATURES, 0, ROWS, CONST.FEATURES).to(tl.float32)
        u *= tl.load(system.rnorm + here)[:, None]
        acc -= u * tl.sum(u * acc, 1)[:, None]
    acc *= (tl.load(system.inverse + here) * (factor * c / NORMAL))[:, None]
    tl.store(du + here[:, None] * CONST.FEATURES + features[None, :], acc.to(du.dtype.element_ty))


class _Launches:
    """The launches for one system, padded: n heads of P positions of which the new ones start at `first`.

    values: v, and y of the past, or dy: their columns decide the scales.
    """

    def __init__(self, system: System, v: Tensor, tiles: SolveTiles | None, *values: Tensor | None) -> None:
        (*heads, T, D), S = system.k.shape, system.past_length
        self.dtype = torch.promote_types(system.k.dtype, v.dtype)
        if system.k_past is not None:
            self.dtype = torch.promote_types(self.dtype, system.k_past.dtype)
        self.kept_dtype = torch.float32 if self.dtype == torch.float32 else torch.float16
        where = architecture(system.k.device)
        self.system, self.n, self.device = system, math.prod(heads), v.device
        self.multiply: Precisions = precisions(where, self.dtype)
        self.features, self.values = padded_size(D), padded_size(v.shape[3])
        self.tiles = tiles or solve_tiles(where, self.dtype, self.features, self.values)
        chunk = self.tiles.chunk
        self.first = triton.cdiv(S, chunk) * chunk
        self.P = self.first + triton.cdiv(T, chunk) * chunk
        self.padded = self._pad_system()
        self.scales = scales_of(self._largest(*values))

    def _pad_system(self) -> PaddedSystem:
        system, n, P = self.system, self.n, self.P
        keys = system.k.new_empty(n, P, self.features, dtype=self.kept_dtype)
        rnorm, inverse = (system.k.new_empty(n, P, dtype=torch.float32) for _ in range(2))
        for k, past in ((system.k_past, True), (system.k, False)):
            if k is not None:
                self._pack(pack_keys_kernel, k, (keys, rnorm, inverse), past, self.features)
        B, H, T, _ = system.k.shape
        weights = system.k.new_zeros(B, H, P, dtype=torch.float32)
        new = weights[:, :, self.first : self.first + T]
        new.copy_(system.beta) if system.beta is not None else new.fill_(1)
        if system.key_mask is not None:
            new.masked_fill_(~system.key_mask[:, None, system.past_length :], 0)
        documents = system.k.new_empty(0, dtype=torch.int32)
        if system.cu_seqlens is not None:
            documents = packing.document_bounds(system.cu_seqlens, T, P, system.k.device)
        c = system.sharpness
        c = c.reshape(n).float().contiguous() if isinstance(c, Tensor) else rnorm.new_full((n,), c)
        return PaddedSystem(keys, rnorm, inverse, weights.view(n, P), documents, c, system.strength)

    def _largest(self, *tensors: Tensor | None) -> Tensor:
        """The largest finite entry of every column of tensors [B, H, *, E], without masked positions: [n, E']."""
        out, S, mask = None, self.system.past_length, self.system.key_mask
        for x in tensors:
            if x is not None:
                visible = torch.nan_to_num(x, 0, 0, 0)
                if mask is not None:
                    places = mask[:, :S] if x is self.system.y_past else mask[:, S:]
                    visible = visible.masked_fill_(~places[:, None, :, None], 0)
                columns = torch.linalg.vector_norm(visible, math.inf, 2, dtype=torch.float32).flatten(0, 1)
                out = columns if out is None else torch.maximum(out, columns)
        assert out is not None
        return torch.nn.functional.pad(out, (0, self.values - out.shape[1]))

    def _pack(
        self, kernel: triton.JITFunction, x: Tensor, outs: tuple[Tensor, ...], past: bool, padded: int,
        piece: int | None = None,
    ) -> None:  # fmt: skip
        """Copy x: [B, H, *, size] to its rows among the past or the new positions of `outs`: [n, P, padded]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        low, high = (0, self.first) if past else (self.first, self.P)
        H, length, mask, unit = x.shape[1], x.shape[2], self.system.key_mask, stride_unit(x)
        if mask is not None:
            mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
            mask = mask[:, 0 if past else self.system.past_length :]
        tiles, piece = (high - low) // PACK_ROWS, piece or padded
        kernel[(self.n * tiles, triton.cdiv(padded, piece))](
            x, outs[0] if mask is None else mask, *outs, H, *(stride // unit for stride in x.stride()[:3]),
            0 if mask is None else mask.stride(0), length, high - length if past else low, low, tiles, self.P,
            CONST=PackConstants(x.shape[3], padded, piece, unit, PACK_ROWS, mask is not None), num_warps=4,
            **registers(kernel, self.device),
        )  # fmt: skip

    def value_buffer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.padded.keys.new_empty(self.n, self.P, self.values, dtype=dtype)

    def pack_values(self, x: Tensor | None, out: Tensor, past: bool, scales: Tensor | None = None) -> None:
        """Copy x [B, H, *, E], scaled, to its places among the past or the new positions of `out`; None: zeros."""
        low, high = (0, self.first) if past else (self.first, self.P)
        if low == high:
            return
        if x is None:
            out[:, low:high] = 0
            return
        outs = out, self.scales if scales is None else scales
        self._pack(pack_values_kernel, x, outs, past, self.values, min(64, self.values))

    def _launch(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], tile: Tile, *arguments: object, **constants: Any
    ) -> None:
        """Launch a kernel that makes tiles of L. constants: those of `Constants` beyond what all of them need."""
        const = Constants(
            FEATURES=self.features, VALUES=self.values, PIECE=min(tile.keys, self.features),
            PACKED=self.system.cu_seqlens is not None, PRECISION=self.multiply.keys, **constants,
        )  # fmt: skip
        kernel[grid](
            self.padded, *arguments, P=self.P, CONST=const, num_warps=tile.warps, num_stages=tile.stages,
            **registers(kernel, self.device),
        )  # fmt: skip

    def inverses(self, start: int, strips: int, size: int, adjoint: bool) -> Tensor:
        """Those of some strips of `size` rows from `start` on: [n, strips, size, size]."""
        block, algebra = self.tiles.block, TritonAlgebra(self.tiles.product, self.multiply.inverse)
        matrices = self.padded.keys.new_empty(self.n * strips, size, size, dtype=torch.float32)
        tiles = strips * size // block
        self._launch(
            blocks_kernel, (self.n * tiles, size // block), self.tiles.inverse, matrices, start, tiles, size // 16,
            BLOCK=block, ADJOINT=adjoint,
        )  # fmt: skip
        return algebra.inverse_(matrices)

    def update(
        self, solved: Tensor, lower: Tensor | None, residuals: Tensor, targets: tuple[int, int], source: tuple[int, int]
    ) -> None:
        """Subtract the columns [source) of solved rows from the residuals of the rows [targets)."""
        tile = self.tiles.update
        count, width = (targets[1] - targets[0]) // tile.rows, min(tile.values, self.values)
        if count <= 0 or source[0] >= source[1]:
            return
        self._launch(
            update_kernel, (self.n * count, self.values // width), tile, solved, solved if lower is None else lower,
            residuals, targets[0], count, *source, ROWS=tile.rows, COLUMNS=tile.cols, WIDTH=width,
            LOWER=lower is not None,
        )  # fmt: skip

    def strip_size(self) -> int:
        """Rows that are solved at once: no more than there are, or than memory holds inverses of."""
        size, length = self.tiles.strip, self.P - self.first
        while size > self.tiles.chunk and (size // 2 >= length or self.n * size * size * 4 > INVERSE_BYTES):
            size //= 2
        return size

    def sweep(
        self, residuals: Tensor, solved: Tensor, lower: Tensor | None, out: Tensor, z: Tensor | None,
        products: Tensor | None, adjoint: bool,
    ) -> None:  # fmt: skip
        """Solve all strips in order, or for the adjoint in reverse order."""
        tile, size, more = self.tiles.solve, self.strip_size(), lower if self.dtype == torch.float16 else None
        together = max(1, INVERSE_BYTES // (self.n * size * size * 4)) * size
        width = min(tile.values, self.values)
        rest = (x if x is not None else out for x in (z, products))
        outputs = solved if lower is None else lower, out, *rest
        const = Constants(
            VALUES=self.values, WIDTH=width, COLUMNS=tile.cols, BLOCK=self.tiles.block, ADJOINT=adjoint,
            BETA=z is not None, LOWER=lower is not None, INVERSE=self.multiply.inverse,
        )  # fmt: skip
        order = slice(None, None, -1 if adjoint else 1)
        for begin in range(self.first, self.P, together)[order]:
            end = min(begin + together, self.P)
            strips = triton.cdiv(end - begin, size)
            inverses = self.inverses(begin, strips, size, adjoint)
            for low in range(begin, end, size)[order]:
                high = min(low + size, self.P)
                tiles = (high - low) // self.tiles.block
                solve_kernel[(self.n * tiles, self.values // width)](
                    self.padded.weights, self.scales, inverses, residuals, solved, *outputs, (low - begin) // size,
                    strips, size // 16, low, tiles, self.first, out.shape[2], self.P, E=out.shape[3], CONST=const,
                    num_warps=tile.warps, num_stages=tile.stages, **registers(solve_kernel, self.device),
                )  # fmt: skip
                targets = (self.first, low) if adjoint else (high, self.P)
                self.update(solved, more, residuals, targets, (low, high))

    def key_gradients(self, y: Tensor, g: Tensor, lower: Tensor | None, out: Gradients) -> None:
        """Write the gradients of keys and sharpness. g, lower: [n, P, E'], overwritten in the past."""
        assert out.dk is not None
        tile, system, padded = self.tiles.gradient, self.system, self.padded
        # Scales that cancel those of g in a product with it, up to one factor for each head.
        largest = self._largest(y, system.y_past)
        units = scales_of((largest / self.scales).amax(1))
        scales = units[:, None] / self.scales
        values = self.value_buffer(self.kept_dtype)
        self.pack_values(y, values, past=False, scales=scales)
        self.pack_values(system.y_past, values, past=True, scales=scales)
        for x in (g, lower):
            if x is not None:
                self.pack_values(None, x, past=True)
        count, width = self.P // tile.rows, min(tile.out, self.features)
        row_sums, whole = padded.rnorm.new_empty(padded.rnorm.shape), width == self.features
        dtype = torch.promote_types(out.dk.dtype, (out.dk if out.dk_past is None else out.dk_past).dtype)
        du = out.dk
        if not whole or du.shape[2:] != padded.keys.shape[1:]:
            du = padded.keys.new_empty(padded.keys.shape, dtype=dtype if whole else torch.float32)
        rest = g if lower is None else lower
        self._launch(
            key_gradient_kernel, (self.n * count, self.features // width), tile, values, g, rest, units, du, row_sums,
            self.first, count, OUT=width, WIDTH=min(tile.values, self.values), ROWS=tile.rows, COLUMNS=tile.cols,
            LOWER=lower is not None, SHARPNESS=out.dsharpness is not None,
        )  # fmt: skip
        if out.dsharpness is not None:
            out.dsharpness.copy_(row_sums[:, self.first :].sum(1).view(out.dsharpness.shape))
        if not whole:
            u = padded.keys * padded.rnorm[..., None]
            du.addcmul_(u, torch.linalg.vecdot(u, du)[..., None], value=-1)
        for dk, low in ((out.dk_past, self.first - system.past_length), (out.dk, self.first)):
            if dk is not None and dk is not du:
                dk.copy_(du[:, low : low + dk.shape[2], : dk.shape[3]].view(dk.shape))


def scales_of(largest: Tensor) -> Tensor:
    """The powers of two, from 2^-120 to 2^120, that bring float32 numbers to between 1 and 2."""
    exponents = (largest.view(torch.int32) >> 23).clamp(7, 247)
    return ((254 - exponents) << 23).view(torch.float32)


def forward(system: System, v: Tensor, y: Tensor, z: Tensor | None, tiles: SolveTiles | None = None) -> None:
    """Write y [B, H, T, E] and, if it is not None, z [B, H, T, E], both contiguous."""
    with on_device(v):
        launches = _Launches(system, v, tiles, v, system.y_past)
        residuals, solved = launches.value_buffer(), launches.value_buffer(launches.kept_dtype)
        launches.pack_values(v, residuals, past=False)
        launches.pack_values(system.y_past, solved, past=True)
        # Scaled values of the past are exact in float16.
        lower = torch.empty_like(solved) if launches.dtype == torch.float16 else None
        launches.update(solved, None, residuals, (launches.first, launches.P), (0, launches.first))
        launches.sweep(residuals, solved, lower, y, z, None, adjoint=False)


def backward(
    system: System, dy: Tensor, y: Tensor, z: Tensor | None, out: Gradients, tiles: SolveTiles | None = None
) -> None:
    """Write all gradients that have a buffer in `out`, contiguous. dk is needed for dk_past and dsharpness."""
    with on_device(dy):
        launches = _Launches(system, y, tiles, dy)
        residuals, g = launches.value_buffer(), launches.value_buffer(launches.kept_dtype)
        exact = launches.dtype == torch.float16
        # No inverse bounds what an error of g does in the past, so its lower half counts there.
        lower = torch.empty_like(g) if exact or (launches.first and g.dtype == torch.float16) else None
        launches.pack_values(dy, residuals, past=False)
        launches.pack_values(None, residuals, past=True)
        products = None
        if z is not None:
            pieces = launches.values // min(launches.tiles.solve.values, launches.values)
            products = dy.new_empty(launches.n, pieces, dy.shape[2], dtype=torch.float32)
        launches.sweep(residuals, g, lower, out.dv, z, products, adjoint=True)
        launches.update(g, lower, residuals, (0, launches.first), (launches.first, launches.P))
        if out.dbeta is not None and products is not None:
            out.dbeta.copy_(system.zero_masked(products.sum(1).view(out.dbeta.shape)))
        if out.dy_past is not None:
            past = residuals[:, launches.first - system.past_length : launches.first] / launches.scales[:, None]
            past = past[..., : dy.shape[3]].reshape(out.dy_past.shape)
            if system.key_mask is not None:
                past = past.masked_fill(~system.key_mask[:, None, : system.past_length, None], 0)
            out.dy_past.copy_(past)
        if out.dk is not None:
            launches.key_gradients(y, g, lower if exact else None, out)
