"""Arithmetic of a GPU in Triton's interpreter, for tests: products as a GPU makes them, bfloat16 rounded to nearest.

The interpreter multiplies the bits of bfloat16 as integers, cuts them off where it should round, and knows neither
"bf16x3" nor the rounding of "tf32". `install` fixes that; `conftest.py` calls it if TRITON_INTERPRET is set.

The interpreter runs programs one after another, so a race does not show in a result. Therefore every address that a
program reads or writes is logged, and a launch whose programs depend on each other raises `Race`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")


def install() -> None:
    """Change the interpreter of this process. A second call changes nothing."""
    if interpreter._convert_float is _convert_float:
        return
    _convert_float.original = interpreter._convert_float  # type: ignore[attr-defined]
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._patch_lang = _PatchedOnce(interpreter._patch_lang)
    _log_addresses()
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, allowed_dot_input_precisions=PRECISIONS)


class Race(AssertionError):
    """Two programs of a launch use one address, and one of them writes; or a program reads what it wrote."""


class _Addresses:
    """The addresses of one launch, by program."""

    def __init__(self) -> None:
        self.program = -1
        self.read, self.written = list[tuple[int, Any]](), list[tuple[int, Any]]()

    def load(self, addresses: Any) -> None:
        self.read.append((self.program, np.unique(addresses)))
        for program, own in reversed(self.written):
            if program != self.program:
                break
            if np.isin(addresses, own).any():
                raise Race("a program reads what it wrote before, which may not be there yet")

    def store(self, addresses: Any) -> None:
        self.written.append((self.program, np.unique(addresses)))

    def check(self) -> None:
        if not self.written:
            return
        places, writers = self._joined(self.written)
        order = np.lexsort((writers, places))
        places, writers = places[order], writers[order]
        if ((places[1:] == places[:-1]) & (writers[1:] != writers[:-1])).any():
            raise Race("two programs write to one address")
        for program, addresses in self.read:
            found = np.minimum(np.searchsorted(places, addresses), len(places) - 1)
            if ((places[found] == addresses) & (writers[found] != program)).any():
                raise Race("a program reads what another one writes")

    def _joined(self, log: list[tuple[int, Any]]) -> tuple[Any, Any]:
        return np.concatenate([x for _, x in log]), np.concatenate([np.full(len(x), program) for program, x in log])


def _log_addresses() -> None:
    log, builder, grid = [_Addresses()], interpreter.InterpreterBuilder, interpreter.GridExecutor
    next_program, load, store, launch = (
        builder.set_grid_idx, builder.create_masked_load, builder.create_masked_store, grid.__call__
    )  # fmt: skip

    def set_grid_idx(self: Any, *index: int) -> None:
        log[0].program += 1
        next_program(self, *index)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        log[0].load(ptrs.data[mask.data.astype(bool)])
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, policy: Any) -> Any:
        log[0].store(ptrs.data[mask.data.astype(bool)])
        return store(self, ptrs, value, mask, policy)

    def call(self: Any, *args: Any, **options: Any) -> None:
        log[0] = _Addresses()
        launch(self, *args, **options)
        log[0].check()

    builder.set_grid_idx, builder.create_masked_load = set_grid_idx, create_masked_load
    builder.create_masked_store, grid.__call__ = create_masked_store, call


class _PatchedOnce:
    """The interpreter changes triton.language at every call of a function, also of `tl.sum`, and back after a kernel.
    That takes most of its time. Here once for the functions of a module, for good."""

    def __init__(self, patch: Any) -> None:
        self.patch, self.modules = patch, set[int]()

    def __call__(self, function: Any) -> Any:
        module = id(function.__globals__)
        if module not in self.modules:
            self.modules.add(module)
            self.patch(function)
        return self

    def restore(self) -> None:
        """Nothing to do."""


def _bfloat16(bits: Any) -> Tensor:
    """Values of an array of bits."""
    return (torch.from_numpy(bits.astype("int32")) << 16).view(torch.float32)


def _convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    if (source, target) == (tl.bfloat16, tl.float32):
        return _bfloat16(data).numpy()
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.tensor(data).to(torch.bfloat16).view(torch.uint16).numpy()
    return _convert_float.original(data, source, target, rounding)  # type: ignore[attr-defined]


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    left, right = (_operand(x) for x in (a, b))
    name = input_precision.name.lower() if a.dtype.scalar == tl.float32 else "ieee"
    # A GPU's kernels do not know autocast.
    with torch.autocast("cpu", enabled=False):
        product = multiply(left, right, name) + torch.tensor(d.data)
    return interpreter.TensorHandle(product.numpy(), d.dtype.scalar)


def _operand(x: Any) -> Tensor:
    if x.dtype.scalar == tl.bfloat16:
        return _bfloat16(x.data)
    return torch.tensor(x.data).float()


def multiply(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """a · b as a GPU makes it from float32 operands at an `input_precision`, summed in float32."""
    if precision == "ieee":
        return a @ b
    if precision == "tf32":
        return _tf32(a) @ _tf32(b)
    parts, cut = {"tf32x3": (2, _tf32), "bf16x3": (2, _bf16), "bf16x6": (3, _bf16)}[precision]
    left, right = _split(a, parts, cut), _split(b, parts, cut)
    # The smallest products first; those below the precision of the operands are left out.
    orders = [(i, total - i) for total in reversed(range(parts)) for i in range(total + 1)]
    out = torch.zeros(a.shape[0], b.shape[1])
    for i, j in orders:
        out = out + left[i] @ right[j]
    return out


def _split(x: Tensor, parts: int, cut: Any) -> list[Tensor]:
    out = []
    for _ in range(parts):
        out.append(cut(x))
        x = x - out[-1]
    return out


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)
