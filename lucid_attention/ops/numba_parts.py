"""What kernels in Numba share: memory at addresses, counting threads, the exponential."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Everything that lets LLVM vectorise sums, but NaN and infinities keep their meaning.
FAST = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy"}
INNER = FAST | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
F = np.float32
ZERO = F(0)
# A number of each dtype of a cache. Numba has no 16-bit floats: integers hold their bits.
EXAMPLES = {"float32": ZERO, "bfloat16": np.uint16(0), "float16": np.int16(0)}
# The square of the smallest norm that is not zero.
SMALLEST = float(np.finfo(np.float32).tiny) ** 2


def sources() -> int:
    """A checksum of the files that kernels are made of. A kernel closes over it.

    Numba keeps compiled code as long as the file of a kernel and what it closes over stay the same. It does not look
    into other files.
    """
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("numba_*.py")), folder / "softmax" / "job.py"]
    return 1 + zlib.crc32(b"".join(file.read_bytes() for file in files if file.exists()))


@intrinsic
def pointer(context: Any, address: Any, example: Any) -> Any:
    """The memory at an address as numbers like `example`."""

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
