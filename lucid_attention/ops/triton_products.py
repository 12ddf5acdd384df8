"""Products of float32 matrices and inverses of triangular blocks by Triton kernels."""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .triangular import Algebra
from .triton_tiles import Tile, architecture, registers

# Strides are passed in multiples of it, so that the compiler knows their divisors; blocks of it are inverted directly.
SIXTEEN = tl.constexpr(16)


@triton.jit(
    do_not_specialize=[
        "alpha", "beta", "inner", "tiles", "depth", "a_outer", "a_inner", "b_outer", "b_inner", "c_outer", "c_inner",
        "out_outer", "out_inner", "a_leading", "b_leading", "c_leading", "out_leading",
    ]
)  # fmt: skip
def path_product_kernel(
    a, b, c, out, alpha, beta, inner, tiles, depth, a_outer, a_inner, b_outer, b_inner, c_outer, c_inner, out_outer,
    out_inner, a_leading, b_leading, c_leading, out_leading,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, A_LOWER: tl.constexpr, B_LOWER: tl.constexpr,
    ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = alpha · a · b, or beta · c + alpha · a · b, for a batch of outer · inner; out may be c itself.

    A_LOWER, B_LOWER: a or b is lower triangular, and its tiles above the diagonal are not read.
    """
    a_leading *= SIXTEEN
    b_leading *= SIXTEEN
    c_leading *= SIXTEEN
    out_leading *= SIXTEEN
    # Only the first dimension of a grid may be larger than 65535.
    batch = tl.program_id(0) // tiles
    first = (batch // inner).to(tl.int64)
    second = (batch % inner).to(tl.int64)
    # Offsets inside a tile have 32 bits, those of tiles 64.
    i = (tl.program_id(0) % tiles * ROWS).to(tl.int64)
    j = (tl.program_id(1) * COLUMNS).to(tl.int64)
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    deep = tl.arange(0, DEPTH)
    low = j if B_LOWER else 0
    high = i + ROWS if A_LOWER else depth
    a += (first * a_outer + second * a_inner) * SIXTEEN + (i + low * a_leading if A_TRANSPOSED else i * a_leading + low)
    b += (first * b_outer + second * b_inner) * SIXTEEN + (j * b_leading + low if B_TRANSPOSED else j + low * b_leading)
    left_offsets = rows + deep[None, :] * a_leading if A_TRANSPOSED else rows * a_leading + deep[None, :]
    right_offsets = columns * b_leading + deep[:, None] if B_TRANSPOSED else columns + deep[:, None] * b_leading
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(low, high, DEPTH):
        acc = tl.dot(tl.load(a + left_offsets), tl.load(b + right_offsets), acc, input_precision=PRECISION)
        a += DEPTH * a_leading if A_TRANSPOSED else DEPTH
        b += DEPTH if B_TRANSPOSED else DEPTH * b_leading
    acc *= alpha
    if ADDS:
        c += (first * c_outer + second * c_inner) * SIXTEEN + i * c_leading + j
        acc += beta * tl.load(c + rows * c_leading + columns)
    out += (first * out_outer + second * out_inner) * SIXTEEN + i * out_leading + j
    tl.store(out + rows * out_leading + columns, acc)


@triton.jit(do_not_specialize=["blocks"])
def inverse_kernel(matrix, blocks, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Diagonal blocks of SIZE = 16 · 2^LEVELS of matrices of `blocks` blocks become (I + block)⁻¹.

    Blocks of 16 by forward substitution, all at once: powers of L would grow although the inverse is bounded. Then
    neighbours are joined by products: the corner of their inverse is −X₁ L₁₀ X₀.
    """
    MANY: tl.constexpr = SIZE // SIXTEEN
    pid = tl.program_id(0)
    size = blocks * SIZE
    here = matrix + (pid // blocks).to(tl.int64) * size * size + (pid % blocks) * (SIZE * (size + 1))
    block = tl.arange(0, MANY)[:, None, None] * (SIXTEEN * (size + 1))
    inner = tl.arange(0, SIXTEEN)[None, :, None]
    outer = tl.arange(0, SIXTEEN)[None, None, :]
    # Read as their transposes, whose columns i are rows i of the blocks.
    upper = tl.load(here + block + inner + outer * size)
    x = tl.where((inner == outer) & (block >= 0), 1.0, 0.0)
    for i in range(1, SIXTEEN):
        row = tl.sum(tl.where(outer == i, upper, 0.0), 2)
        change = tl.sum(row[:, :, None] * x, 1)
        x -= tl.where(inner == i, change[:, None, :], 0.0)
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    x = tl.broadcast_to(tl.reshape(x, (SIZE, 1, SIXTEEN)), (SIZE, MANY, SIXTEEN))
    x = tl.where(rows // SIXTEEN == columns // SIXTEEN, tl.reshape(x, (SIZE, SIZE)), 0.0)
    for level in tl.static_range(LEVELS):
        half = SIXTEEN * 2**level
        corners = (rows // half % 2 == 1) & (columns // half == rows // half - 1)
        corner = tl.where(corners, tl.load(here + rows * size + columns), 0.0)
        corner = tl.dot(corner, x, input_precision=PRECISION)
        x -= tl.dot(x, corner, input_precision=PRECISION)
    tl.store(here + rows * size + columns, x)


@dataclass(frozen=True)
class TritonAlgebra(Algebra):
    """Products of float32 matrices at a precision that no setting of torch can lower; sizes are multiples of 16."""

    tile: Tile
    precision: str

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        a, b, flat = (x.flatten(1, -3) if x.ndim > 4 else x for x in (a, b, out))
        self._run(None, a, b, flat, 1.0, 0.0)
        return out

    def plus_product(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        out = a.new_empty(*a.shape[:-1], b.shape[-1])
        return self._run(c.expand_as(out), a, b, out, alpha, 1.0)

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        return self._run(c, a, b, c, alpha, beta)

    def solve_(self, matrix: Tensor, y: Tensor) -> None:
        y.copy_(self.product(self.inverse_(matrix.tril(-1)), y))

    def solve_transposed_(self, matrix: Tensor, y: Tensor) -> None:
        y.copy_(self.product(self.inverse_(matrix.tril(-1)).mT, y))

    def inverse_(self, matrix: Tensor) -> Tensor:
        """matrix ← (I + matrix)⁻¹, contiguous [m, N, N], zero on and above the diagonal, N = 16 · 2^i.

        Blocks as large as a tile are joined as in `inverse_kernel`. Tiles above the diagonal are neither read nor
        written.
        """
        m, N, _ = matrix.shape
        size = min(self.tile.rows, N, 32 if self.precision == "bf16x6" else 64)  # 64 spill
        # With 8 warps the machine code of sm_89 has a stack.
        warps = size // (4 if architecture(matrix.device) == "sm_89" else 8)
        inverse_kernel[(m * (N // size),)](
            matrix, N // size, SIZE=size, LEVELS=(size // SIXTEEN.value).bit_length() - 1, PRECISION=self.precision,
            num_warps=warps, **registers(inverse_kernel, matrix.device),
        )  # fmt: skip
        while size < N:
            pairs = matrix.view(m, N // (2 * size), 2 * size, -1, 2 * size).diagonal(dim1=1, dim2=3).movedim(-1, 1)
            first, last, corner = pairs[..., :size, :size], pairs[..., size:, size:], pairs[..., size:, :size]
            part = first.new_empty(first.shape)
            self._run(None, corner, first, part, 1.0, 0.0, b_lower=True)
            self._run(None, last, part, corner, -1.0, 0.0, a_lower=True)
            size *= 2
        return matrix

    def _run(
        self, c: Tensor | None, a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float, a_lower: bool = False,
        b_lower: bool = False,
    ) -> Tensor:  # fmt: skip
        (I, K), J, tile = a.shape[-2:], b.shape[-1], self.tile
        left, right, added, result = operands = [_Matrix.of(x) for x in (a, b, out if c is None else c, out)]
        assert not added.transposed
        assert not result.transposed
        outer, inner = result.batch
        rows, columns = math.gcd(tile.rows, I), math.gcd(tile.cols, J)
        path_product_kernel[(outer * inner * (I // rows), J // columns)](
            a, b, added.x, out, alpha, beta, inner, I // rows, K,
            *(stride for matrix in operands for stride in matrix.strides),
            *(matrix.leading // SIXTEEN.value for matrix in operands),
            A_TRANSPOSED=left.transposed, B_TRANSPOSED=right.transposed, A_LOWER=a_lower,
            B_LOWER=b_lower, ADDS=c is not None,
            ROWS=rows, COLUMNS=columns, DEPTH=math.gcd(tile.keys, K), PRECISION=self.precision,
            num_warps=max(2, tile.warps * rows * columns // (tile.rows * tile.cols)), num_stages=tile.stages,
            **registers(path_product_kernel, out.device),
        )  # fmt: skip
        return out


@dataclass(frozen=True)
class _Matrix:
    """A batch of matrices in memory: rows, or columns if transposed, start every `leading` elements."""

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
        for stride in (leading, outer, inner):
            assert stride % SIXTEEN.value == 0, f"strides must be multiples of {SIXTEEN.value}, got {x.stride()}"
        strides = outer // SIXTEEN.value, inner // SIXTEEN.value
        return _Matrix(x, (x.shape[0], x.shape[1]), leading, transposed, strides)
