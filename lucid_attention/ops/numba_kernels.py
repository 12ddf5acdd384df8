"""Compiled by Numba: what all kernels share, products of a few rows with many keys, the exponential, norms of keys.

Memory is passed by address. Numba has no 16-bit floats: integers hold their bits.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, cfunc, config, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Everything that lets LLVM vectorise sums, but NaN and infinities keep their meaning.
FAST = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
INNER = FAST | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
F = np.float32
ZERO = F(0)
# An element of each dtype of a cache.
EXAMPLES = {"float32": ZERO, "bfloat16": np.uint16(0), "float16": np.int16(0)}
# The square of the smallest norm that is not zero.
SMALLEST = float(np.finfo(np.float32).tiny) ** 2


def sources() -> int:
    """A checksum of the files that kernels are made of. A kernel closes over it.

    Numba keeps compiled code as long as the file of a kernel and what it closes over stay the same. It does not look
    into other files.
    """
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("numba_*.py")), folder / "softmax" / "fused_step.py"]
    return 1 + zlib.crc32(b"".join(file.read_bytes() for file in files if file.exists()))


@intrinsic
def pointer(context: Any, address: Any, example: Any) -> Any:
    """The memory at an address as elements like `example`."""

    def cast(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.CPointer(example)(types.int64, example), cast


@intrinsic
def wide(context: Any, x: Any) -> Any:
    """A stored number as float32. uint16 holds the bits of a bfloat16, int16 those of a float16."""

    def widen(_: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0] == types.uint16:
            bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(bits, ir.FloatType())
        if sig.args[0] == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        return args[0]

    return types.float32(x), widen


@intrinsic
def ticket(context: Any, address: Any) -> Any:
    """The number at an address, which is one more afterwards. No two threads get the same."""

    def take(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), take


@intrinsic
def _bits_to_float(context: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda _, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


# Without "reassoc", which would join the two parts of ln 2. The coefficients are those of Cephes' expf.
@njit(**INNER | {"fastmath": {"contract"}})
def exponential(x: Any) -> Any:
    """exp(x), within 2e-7 of it; 0 below −87, infinite above 88.7. In a form that LLVM vectorises."""
    # Truncated after an offset that makes it positive: rounded to the nearest integer.
    n = np.int32(x * F(1.4426950408889634) + F(1024.5)) - np.int32(1024)
    f = (x - F(n) * F(0.693359375)) - F(n) * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * f + F(1.3981999507e-3)
    p = p * f + F(8.3334519073e-3)
    p = p * f + F(4.1665795894e-2)
    p = p * f + F(1.6666665459e-1)
    p = p * f + F(5.0000001201e-1)
    p = p * f * f + f + F(1.0)
    y = p * _bits_to_float(np.uint32((n + np.int32(127)) << np.int32(23)))
    y = ZERO if x < F(-87.0) else y
    return F(np.inf) if x > F(88.7) else y


# Products of a few rows with many keys or values: the inner loops of the decoding step. LLVM vectorises loops of
# unknown length with a prologue and an epilogue each, which costs more than the few products in them. These are
# written as vectors of LANES elements, which LLVM maps to the instructions of the CPU. 16-bit elements are widened in
# registers.

# A vector register, and rows that are read at a time where there are many: as many as the registers have room for.
AVX512 = "+avx512f" in (config.CPU_FEATURES or get_host_cpu_features().flatten())
LANES, MORE = (16, 4) if AVX512 else (8, 2)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
STORED = {types.float32: (ir.FloatType(), 4), types.uint16: (ir.IntType(16), 2), types.int16: (ir.HalfType(), 2)}


def _at(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, I64(size)))


def _load(builder: Any, address: Any, dtype: Any) -> Any:
    """LANES elements as float32. uint16 holds the bits of a bfloat16, int16 those of a float16."""
    kind, size = STORED[dtype]
    x = builder.load(builder.inttoptr(address, ir.VectorType(kind, LANES).as_pointer()), align=size)
    if dtype == types.uint16:
        shift = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(x, shift.type), shift), VECTOR)
    return builder.fpext(x, VECTOR) if dtype == types.int16 else x


def _store(builder: Any, x: Any, address: Any) -> None:
    builder.store(x, builder.inttoptr(address, x.type.as_pointer()), align=4)


def _zeros(builder: Any, count: int) -> list[Any]:
    """Room for sums in registers."""
    zero = ir.Constant(VECTOR, [0.0] * LANES)
    places = [cgutils.alloca_once(builder, VECTOR) for _ in range(count)]
    for place in places:
        builder.store(zero, place)
    return places


def _add_product(builder: Any, total: Any, x: Any, y: Any) -> None:
    product = builder.fmul(x, y, flags=["contract"])
    builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)


def _broadcast(builder: Any, address: Any) -> Any:
    x = builder.load(builder.inttoptr(address, ir.FloatType().as_pointer()), align=4)
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), x, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _folded(builder: Any, vectors: list[Any]) -> Any:
    """The sums over the lanes of four vectors, as one vector of four."""

    def sum_of(a: Any, b: Any, *choices: list[int]) -> Any:
        masks = (ir.Constant(ir.VectorType(ir.IntType(32), len(choice)), choice) for choice in choices)
        return builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in masks))

    for half in (8, 4)[-(LANES // 8) :]:
        vectors = [sum_of(x, x, [*range(half)], [*range(half, 2 * half)]) for x in vectors]
    a, b, c, d = vectors
    ab, cd = (sum_of(x, y, [0, 4, 1, 5], [2, 6, 3, 7]) for x, y in ((a, b), (c, d)))
    return sum_of(ab, cd, [0, 1, 4, 5], [2, 3, 6, 7])


def _product_tile(rows: int) -> Any:
    """An intrinsic for `rows` rows and four keys."""

    @intrinsic
    def scores(
        context: Any, row: Any, D: Any, whole: Any, keys: Any, stride: Any, into: Any, apart: Any, example: Any
    ) -> Any:
        def make(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            row, D, whole, keys, stride, into, apart, _ = args
            totals = _zeros(builder, 4 * rows)
            with cgutils.for_range_slice(builder, I64(0), whole, I64(LANES)) as (d, _):
                indices = [builder.add(d, builder.mul(D, I64(r))) for r in range(rows)]
                xs = [_load(builder, _at(builder, row, index, 4), types.float32) for index in indices]
                for j in range(4):
                    index = builder.add(d, builder.mul(stride, I64(j)))
                    key = _load(builder, _at(builder, keys, index, STORED[example][1]), example)
                    for r in range(rows):
                        _add_product(builder, totals[4 * r + j], xs[r], key)
            for r in range(rows):
                four = _folded(builder, [builder.load(total) for total in totals[4 * r : 4 * r + 4]])
                _store(builder, four, _at(builder, into, builder.mul(apart, I64(r)), 4))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, example), make

    return scores


def _sum_tile(rows: int, width: int) -> Any:
    """An intrinsic for `rows` rows and `width` · LANES elements of each value."""

    @intrinsic
    def add(
        context: Any, weights: Any, apart: Any, values: Any, stride: Any, count: Any, sums: Any, E: Any, example: Any
    ) -> Any:
        def make(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            weights, apart, values, stride, count, sums, E, _ = args
            size, each = STORED[example][1], [(r, i) for r in range(rows) for i in range(width)]
            places = [_at(builder, sums, builder.add(builder.mul(E, I64(r)), I64(i * LANES)), 4) for r, i in each]
            totals = _zeros(builder, len(each))
            for place, total in zip(places, totals, strict=True):
                builder.store(_load(builder, place, types.float32), total)
            with cgutils.for_range_slice(builder, I64(0), count, I64(1)) as (j, _):
                first = _at(builder, values, builder.mul(stride, j), size)
                loaded = [_load(builder, builder.add(first, I64(i * LANES * size)), example) for i in range(width)]
                for r in range(rows):
                    index = builder.add(j, builder.mul(apart, I64(r)))
                    weight = _broadcast(builder, _at(builder, weights, index, 4))
                    for i in range(width):
                        _add_product(builder, totals[r * width + i], weight, loaded[i])
            for place, total in zip(places, totals, strict=True):
                _store(builder, builder.load(total), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, example), make

    return add


# Write the products of rows, D elements apart, with four keys, `stride` apart, over their first `whole` elements,
# a multiple of LANES. Those of a row go to `into`, those of the next `apart` elements after it.
scores_of_two, scores_of_more = _product_tile(2), _product_tile(MORE)
# Add `count` values, `stride` apart, to the sums of rows, E elements apart. Weights of a row are `apart` elements after
# those of the one before.
add_to_two, add_to_more, add_few_to_two = _sum_tile(2, 4), _sum_tile(MORE, 4), _sum_tile(2, 1)
WIDE = 4 * LANES
# Where a vector is short, a row at a time reads twice as much of each value: whole values come from memory faster than
# halves of them.
add_to_one, WIDEST = _sum_tile(1, 8), 8 * LANES


# Elements that a thread takes at a time.
PIECE = 16384
FIELDS = ("address", "count", "counters", "slots", "next", "done")
ARGUMENTS = from_dtype(np.dtype([(name, np.int64) for name in FIELDS]))


def _exponential_kernel(version: int) -> Any:
    """exp(x) in place: faster than torch's and as exact as float32 needs. version: see `sources`."""

    def step(address: Any) -> None:
        if version == 0:
            return
        arguments = carray(address, 1)[0]
        x, begin = pointer(arguments.address, ZERO), ticket(arguments.counters) * PIECE
        while begin < arguments.count:
            for i in range(begin, min(begin + PIECE, arguments.count)):
                x[i] = exponential(x[i])
            begin = ticket(arguments.counters) * PIECE

    return step


def _norms_kernel(example: Any, version: int) -> Any:
    """1/‖k‖ of a few keys of elements like `example`: for one new token, starting torch's operations takes longer.

    version: see `sources`.
    """

    def norms(keys: int, out: int, B: int, H: int, T: int, D: int, key_b: int, key_h: int, key_t: int) -> None:
        if version == 0:
            return
        k, inverse = pointer(keys, example), pointer(out, ZERO)
        for b in range(B):
            for h in range(H):
                for t in range(T):
                    first, squares = b * key_b + h * key_h + t * key_t, 0.0
                    for d in range(D):
                        x = np.float64(wide(k[first + d]))
                        squares += x * x
                    # Not a number stays so.
                    inverse[(b * H + h) * T + t] = ZERO if squares < SMALLEST else F(1.0 / math.sqrt(squares))

    return norms


def compiled(name: str, cache: bool) -> Any:
    """The C function of a name: "exponential", or "norms_" and a dtype.

    exponential: takes the address of its arguments and works until all of it is done, from any thread.
    norms: takes the addresses of k: [B, H, T, D] and of the norms: [B, H, T], the sizes and k's strides.
    """
    if name == "exponential":
        return cfunc(types.void(types.CPointer(ARGUMENTS)), cache=cache, **FAST)(_exponential_kernel(sources()))
    example = EXAMPLES[name.removeprefix("norms_")]
    return cfunc(types.void(*[types.int64] * 9), cache=cache, **FAST)(_norms_kernel(example, sources()))
