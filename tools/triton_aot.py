"""Compile Triton kernels for GPUs that are not here, exactly as the library would launch them, and check the result.

`recorded(architecture, function)` runs a function with tensors on the meta device and keeps the kernels that it would
launch on that architecture; `compiled` compiles one of them; `faults` says what is wrong with it. A compiler without
complaint proves little: a kernel beyond its tensor memory compiles to a trap without spills. So no stack, shared and
tensor memory within the limits, and a matrix instruction wherever the source has a product.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lucid_attention.ops import triton_tiles

# Shared memory of a program in bytes.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_89": (GPUTarget("cuda", 89, 32), 99 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
TENSOR_MEMORY_COLUMNS = 512
MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)")
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments, its constants and its options: what is compiled once."""

    kernel: JITFunction
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    most_registers: int | None

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(frozen=True)
class Compiled:
    """Registers, bytes of stack and of shared memory, columns of tensor memory, the matrix instruction."""

    registers: int
    stack: int
    shared: int
    tensor_columns: int
    instruction: str
    has_product: bool


@dataclass(frozen=True)
class Call:
    """One launch: its kernel, its grid, its arguments by name, and its options."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int
    most_registers: int | None


def calls(architecture: str, function: Callable[[], object]) -> list[Call]:
    """The launches of `function` in order, none of which happens. Its tensors are on the meta device."""
    found: list[Call] = []

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        warps, stages = options.pop("num_warps", 4), options.pop("num_stages", 3)
        most_registers = options.pop("maxnreg", None)
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        assert set(given) == set(kernel.arg_names), (kernel.__name__, set(given) ^ set(kernel.arg_names))
        found.append(Call(kernel, tuple(grid), given, warps, stages, most_registers))

    with mock.patch.object(JITFunction, "run", record), mock.patch.object(triton_tiles, "forced", architecture):
        function()
    return found


def recorded(architecture: str, function: Callable[[], object]) -> list[Launch]:
    """The kernels that `function` launches, each once. Its tensors are on the meta device."""
    found: dict[Launch, None] = {}
    for call in calls(architecture, function):
        given, parameters = call.arguments, call.kernel.params
        constants = {p.name: given[p.name] for p in parameters if p.is_constexpr}
        signature = {p.name: _type(given[p.name]) for p in parameters if not p.is_constexpr}
        options = call.warps, call.stages, call.most_registers
        found[Launch(call.kernel, tuple(signature.items()), tuple(constants.items()), *options)] = None
    return list(found)


def _type(x: Any) -> Any:
    if isinstance(x, tuple):
        # Triton specialises the integers of a tuple, so that another length would compile again.
        assert all(isinstance(value, torch.Tensor | float) for value in x), x
        return type(x)(*map(_type, x))
    if isinstance(x, torch.Tensor):
        return "*" + TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


def _flat(path: tuple[int, ...], kind: Any) -> Iterator[tuple[tuple[int, ...], str]]:
    """The types of an argument, or of the elements of a tuple, by their place among the arguments."""
    if isinstance(kind, tuple):
        yield from (((*path, j), element) for j, element in enumerate(kind))
    else:
        yield path, kind


def compiled(launch: Launch, architecture: str) -> Compiled:
    target, _ = TARGETS[architecture]
    signature = dict(launch.signature) | {name: "constexpr" for name, _ in launch.constants}
    order = [p.name for p in launch.kernel.params]
    types = {path: kind for i, name in enumerate(order) for path, kind in _flat((i,), signature[name])}
    aligned = {path: [["tt.divisibility", 16]] for path, kind in types.items() if kind.startswith("*")}
    source = ASTSource(launch.kernel, {name: signature[name] for name in order}, dict(launch.constants), aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.most_registers:
        options["maxnreg"] = launch.most_registers
    kernel = triton.compile(source, target=target, options=options)
    text = kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    if target.backend == "cuda":
        registers, stack = _cubin_usage(kernel.asm["cubin"])
    else:
        registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
        spilled, private = (int(re.findall(rf"\.{word}:\s*(\d+)", text)[0])
                            for word in ("vgpr_spill_count", "private_segment_fixed_size"))  # fmt: skip
        stack = max(spilled, private)
    instruction = MATRIX.search(text)
    return Compiled(
        registers,
        stack,
        kernel.metadata.shared,
        getattr(kernel.metadata, "tmem_size", None) or 0,
        instruction.group(1) if instruction else "",
        "tt.dot" in kernel.asm["ttir"],
    )


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        run = subprocess.run([tool, "--dump-resource-usage", file], check=True, capture_output=True, text=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", run.stdout)
    assert usage, run.stdout
    return int(usage.group(1)), int(usage.group(2))


def faults(result: Compiled, architecture: str) -> list[str]:
    """What is wrong with a compiled kernel; empty if nothing is."""
    _, shared = TARGETS[architecture]
    found = []
    if result.stack:
        found.append(f"{result.stack} bytes of stack")
    if result.shared > shared:
        found.append(f"{result.shared} bytes of shared memory, the limit is {shared}")
    if result.tensor_columns > TENSOR_MEMORY_COLUMNS:
        found.append(f"{result.tensor_columns} columns of tensor memory, the limit is {TENSOR_MEMORY_COLUMNS}")
    if result.has_product and not result.instruction:
        found.append("no matrix instruction")
    return found
