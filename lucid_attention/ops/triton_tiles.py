"""What the Triton kernels of all operators share: where they run, how they multiply, how large their tiles are.

A kernel has one fixed configuration (`Tile`) per architecture and shape class. There is no autotuning, and the length
is no key. `python tools/gpu_offline.py` compiles every configuration for every architecture.

Arguments of a kernel: tensors and floats that belong to one thing are one NamedTuple, constants are one NamedTuple (a
single constexpr). Integers that depend on the length stay single arguments in `do_not_specialize`: Triton 3.9
specialises the integers of a tuple on 1 and on multiples of 16, and would compile again for another length.

Rules for every kernel: plain pointers, int64 offsets, no `tl.trans` of a product, one `tl.dot` per accumulator, no
atomics, no reading back of what the kernel wrote.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import interpreted

# Programs that fill a GPU; more splits of a cache than this many programs bring nothing.
PROGRAMS = 512
LEAST_KEYS = 256
MOST_SPLITS = 64

ALL_REGISTERS = 255
# Kernels that spill in some variant: NVIDIA's compiler prefers to spill a few bytes so that more programs run at once.
# These may use all registers of a program. `tools/gpu_offline.py` finds them and writes the table.
SPILLING = {
    "sm_80": "inverse key_gradient path_apply path_product path_step_split",
    "sm_89": "inverse key_gradient pack_keys path_product path_pull path_step_split",
    "sm_90": "path_product path_pull path_step_split",
    "sm_100": "key_gradient path_apply path_product path_pull path_step_split",
    "sm_120": "inverse key_gradient path_apply path_product path_pull path_step_prepare path_step_split step_split update",  # noqa: E501
}

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Precisions:
    """`input_precision` of `tl.dot` for float32 operands."""

    keys: str
    values: str
    gradient: str
    inverse: str


def precisions(architecture: str, dtype: torch.dtype) -> Precisions:
    """For keys and values of a dtype, the wider one if they differ. Products of 16-bit keys ignore `.keys`.

    Tiles of P in plain bfloat16 or tf32 cost 1e-2 and 1e-3 for correlated keys. A gradient of keys keeps only what is
    across the key, so that a product must not bend it: the keys themselves must not be cut off.
    """
    exact = "bf16x6" if architecture.startswith("gfx") else "tf32x3"
    values = exact if dtype == torch.float32 else "bf16x3"
    inverse = "bf16x6" if dtype == torch.float32 else "bf16x3"
    return Precisions(exact, values, "bf16x3" if dtype == torch.bfloat16 else exact, inverse)


# The architecture to assume for tensors on the meta device, where kernels are compiled for GPUs that are not here.
forced: str | None = None


def architecture(device: torch.device) -> str:
    """The name under which configurations for a device are kept."""
    return forced if device.type == "meta" and forced else _architecture(device)


@cache
def _architecture(device: torch.device) -> str:
    if interpreted():
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (8, 0):
        return "sm_80"
    # Other devices of a generation have the shared memory of sm_89 or more.
    return {8: "sm_89", 9: "sm_90", 10: "sm_100"}.get(major, "sm_120")


@dataclass(frozen=True)
class Tile:
    """rows × cols of a tile, the pieces of values and keys that are in flight, warps and pipeline stages.

    out: for gradients of keys, the piece of the head size that one program writes.
    """

    rows: int
    cols: int
    values: int
    keys: int
    warps: int = 4
    stages: int = 2
    out: int = 128


# Of products of float32 matrices.
PRODUCT_TILE = Tile(64, 64, 0, 32)


def padded_size(size: int) -> int:
    """The power of two to which a head size is padded; a product needs at least 16."""
    return max(16, triton.next_power_of_2(size))


def stride_unit(*tensors: Tensor) -> int:
    """The largest power of two up to 16 that divides all strides but the last ones, which are 1.

    Kernels take strides in multiples of it, a constant that lengths do not change: so loads of 16 bytes are possible.
    """
    return math.gcd(16, *(stride for x in tensors for stride in x.stride()[:-1]))


def splits_of(n: int, places: int) -> int:
    """How many programs share the cache of a head: from shapes only, so that a CUDA graph can hold the launch."""
    wanted = min(triton.cdiv(PROGRAMS, n), triton.cdiv(places, LEAST_KEYS), MOST_SPLITS)
    return max(1, wanted)


def registers(kernel: triton.JITFunction, device: torch.device) -> dict[str, int]:
    """Register options of a launch of this kernel."""
    names = SPILLING.get(architecture(device), "").split()
    return {"maxnreg": ALL_REGISTERS} if kernel.__name__.removesuffix("_kernel") in names else {}


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


@triton.jit
def key_rows(keys, first, FEATURES: tl.constexpr, start, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Rows [first, first + ROWS) of `keys` [*, FEATURES], features [start, start + PIECE): [ROWS, PIECE]."""
    offsets = tl.arange(0, ROWS)[:, None] * FEATURES + tl.arange(0, PIECE)[None, :]
    return tl.load(keys + first * FEATURES + start + offsets)


@triton.jit
def key_columns(keys, first, FEATURES: tl.constexpr, start, COLUMNS: tl.constexpr, PIECE: tl.constexpr):
    """`key_rows`, read as its transpose: [PIECE, COLUMNS]."""
    offsets = tl.arange(0, PIECE)[:, None] + tl.arange(0, COLUMNS)[None, :] * FEATURES
    return tl.load(keys + first * FEATURES + start + offsets)


@triton.jit
def score_tile(
    left,
    left_first,
    right,
    right_first,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left[rows] · right[columns]ᵀ: [ROWS, COLUMNS] in float32. The firsts are int64."""
    scores = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, FEATURES, PIECE):
        a = key_rows(left, left_first, FEATURES, start, ROWS, PIECE)
        b = key_columns(right, right_first, FEATURES, start, COLUMNS, PIECE)
        scores = tl.dot(a, b, scores, input_precision=PRECISION)
    return scores


@triton.jit
def exponentials(cosines, sharpness):
    """exp(c (cos θ − 1))."""
    return tl.exp2((cosines - 1.0) * (sharpness * LOG2_E))


@triton.jit
def exact_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a · b. A 16-bit b is exact, so a product with its lower half would be zero: the halves of a are enough."""
    if b.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        high = a.to(b.dtype)
        acc = tl.dot(high, b, acc)
        acc = tl.dot((a - high.to(tl.float32)).to(b.dtype), b, acc)
    return acc


@triton.jit
def softmax_step(scores, values, top, total, acc, row_of_p, PRODUCT: tl.constexpr):
    """Take scores [ROWS, COLUMNS], exponents of 2, and their values into an online softmax.

    top, total: [ROWS], maxima and sums of exponentials so far; acc: [ROWS, VALUES], their products with values. Rows of
    P (`row_of_p` [ROWS]) are not shifted: their largest exponent is that of the new key itself, 0.
    """
    highest = tl.where(row_of_p, 0.0, tl.maximum(top, tl.max(scores, 1)))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    acc = exact_dot(weights, values, acc * shrink[:, None], PRODUCT)
    return highest, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def combine_splits(
    maxima, sums, parts, n, splits, columns, ROWS: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr
):
    """`top`, `total` and `acc` of `softmax_step` over all splits of head n. columns: [WIDTH], of `parts`.

    maxima, sums: [n, splits, ROWS]; parts: [n, splits, ROWS, VALUES].
    """
    rows = tl.arange(0, ROWS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(splits):
        here = (n * splits + split) * ROWS + rows
        part = tl.load(maxima + here)
        highest = tl.maximum(top, part)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, grow = tl.exp2(top - finite), tl.exp2(part - finite)
        total = total * shrink + tl.load(sums + here) * grow
        acc = acc * shrink[:, None] + tl.load(parts + here[:, None] * VALUES + columns[None, :]) * grow[:, None]
        top = highest
    return top, total, acc
