"""Products of a few rows with many keys or values, in vector instructions: the inner loops of the decoding step.

LLVM vectorises loops of a length that it does not know with a prologue and an epilogue each, which costs more than the
few products in them. These are written as vectors of LANES numbers, which it turns into what the CPU has. 16-bit
numbers are widened in registers. All memory is given by addresses.
"""

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

# A vector register, and rows that are read at a time where there are many: as many as the registers have room for.
AVX512 = "+avx512f" in (config.CPU_FEATURES or get_host_cpu_features().flatten())
LANES, MORE = (16, 4) if AVX512 else (8, 2)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
STORED = {types.float32: (ir.FloatType(), 4), types.uint16: (ir.IntType(16), 2), types.int16: (ir.HalfType(), 2)}


def _at(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, I64(size)))


def _load(builder: Any, address: Any, dtype: Any) -> Any:
    """LANES numbers as float32. uint16 holds the bits of a bfloat16, int16 those of a float16."""
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
    """An intrinsic for `rows` rows and `width` · LANES numbers of each value."""

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


# Write the products of rows, D numbers apart, with four keys, `stride` apart, over their first `whole` numbers,
# a multiple of LANES. Those of a row go to `into`, those of the next `apart` numbers after it.
scores_of_two, scores_of_more = _product_tile(2), _product_tile(MORE)
# Add `count` values, `stride` apart, to the sums of rows, E numbers apart. Weights of a row are `apart` numbers after
# those of the one before.
add_to_two, add_to_more, add_few_to_two = _sum_tile(2, 4), _sum_tile(MORE, 4), _sum_tile(2, 1)
WIDE = 4 * LANES
# Where a vector is short, a row at a time reads twice as much of each value: whole values come from memory faster than
# halves of them.
add_to_one, WIDEST = _sum_tile(1, 8), 8 * LANES
