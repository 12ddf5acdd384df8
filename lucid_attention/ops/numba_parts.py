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
