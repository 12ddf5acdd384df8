"""Compile every Triton kernel for GPUs that are not here, as the library launches it, and check what came out.

    python tools/gpu_offline.py                    all; exits with 1 if a kernel is at fault, and writes the record
    python tools/gpu_offline.py --only sm_90       some architectures; writes nothing
    python tools/gpu_offline.py --kernels update   kernels whose name contains a word; writes nothing

Operators run on the meta device; their launches are recorded and compiled ahead of time. A compiler without complaint
proves little: a kernel beyond its tensor memory compiles to a trap without spills. So a kernel must have no stack,
shared and tensor memory within the limits, a matrix instruction wherever the source has a product, loads of more than
two bytes, no product with an operand that is zero by construction and, with three stages, copies that overlap with
matrix instructions. A kernel that
spills may use all registers: it goes to the table of `ops/triton_tiles.py`, and is compiled again. Needs Triton and no
GPU. Twenty minutes on one core; Triton keeps what it compiled.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lucid_attention.ops import triton_tiles
from lucid_attention.ops.lucid import triton_decode, triton_solve
from lucid_attention.ops.lucid.system import Gradients, System
from lucid_attention.ops.path import triton_decode as path_triton_decode
from lucid_attention.ops.path import triton_pass
from lucid_attention.ops.path.decode import PathDecoded
from lucid_attention.ops.path.system import PathSystem
from lucid_attention.ops.softmax.one_token import Token

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "records" / "gpu" / "kernels.json"
SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Lengths of the cases.
T, S = 1024, 300
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
# Loads of two bytes that are single numbers: a step size, a key's own norm.
FEW = 8
TWO_BYTES = re.compile(r"LDG\.E\.[US]16|ld\.global(?:\.\w+|::\w+)*\.[bsu]16|load_ushort|load_sshort|load_short_d16")
LABEL, BRANCH = re.compile(r"(\.L\w+):"), re.compile(r"(?:BRA(?:\.\w+)*|s_c?branch\w*) .*?(\.L\w+)")
INSTRUCTION = re.compile(r"\s+(?:/\*[0-9a-f]{4,}\*/\s+\S|[sv]_\w+ |ds_\w+ |buffer_|global_|s_barrier|s_waitcnt)")
MATRIX_CODE = re.compile(r"[A-Z]MMA|v_mfma")
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
    """Registers, bytes of stack and of shared memory, columns of tensor memory, the matrix instruction.

    two_bytes: loads of two bytes; zero_products: products of three or more parts of which one operand has a single one;
    late_copies: loops that wait for all copies of the iteration before; issued: instructions of a warp in one iteration
    of the outermost loop with matrix instructions (the median, if there are several), 0 without one; inner: the mean of
    those of the loops inside it, 0 without one, or where loops are not looked at.
    """

    registers: int
    stack: int
    shared: int
    tensor_columns: int
    instruction: str
    has_product: bool
    two_bytes: int = 0
    zero_products: int = 0
    late_copies: int = 0
    issued: int = 0
    inner: int = 0


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
    return list(dict.fromkeys(launch_of(call) for call in calls(architecture, function)))


def launch_of(call: Call) -> Launch:
    given, parameters = call.arguments, call.kernel.params
    constants = {p.name: given[p.name] for p in parameters if p.is_constexpr}
    signature = {p.name: _type(given[p.name]) for p in parameters if not p.is_constexpr}
    options = call.warps, call.stages, call.most_registers
    return Launch(call.kernel, tuple(signature.items()), tuple(constants.items()), *options)


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


def compiled(launch: Launch, architecture: str, loops: bool = False) -> Compiled:
    """loops: whether the loops are looked at even where nothing is to be checked."""
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
    if target.backend == "cuda":
        # Disassembling takes a third of the time. Loads are the same before the assembler.
        text = _sass(kernel.asm["cubin"]) if loops or launch.stages > 2 else kernel.asm["ptx"]
        registers, stack = _cubin_usage(kernel.asm["cubin"])
    else:
        text = kernel.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
        spilled, private = (int(re.findall(rf"\.{word}:\s*(\d+)", text)[0])
                            for word in ("vgpr_spill_count", "private_segment_fixed_size"))  # fmt: skip
        stack = max(spilled, private)
    instruction = MATRIX.search(kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"])
    outer, inner = matrix_loops(text)
    return Compiled(
        registers,
        stack,
        kernel.metadata.shared,
        getattr(kernel.metadata, "tmem_size", None) or 0,
        instruction.group(1) if instruction else "",
        "tt.dot" in kernel.asm["ttir"],
        len(TWO_BYTES.findall(text)),
        zero_products(kernel.asm["ttir"]),
        sum(launch.stages > 2 and waits_for_all(loop) for loop in outer),
        statistics.median_low(map(len, outer)) if outer else 0,
        round(statistics.mean(map(len, inner))) if inner and outer != inner else 0,
    )


def matrix_loops(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """The instructions of the outermost and of the innermost loops with matrix instructions, from machine code."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[tuple[int, int]] = []
    # After the exit are waits that jump back to where they belong, and are no loops.
    for line in (text.rpartition("EXIT ;")[0] or text).splitlines():
        if label := LABEL.match(line):
            labels[label.group(1)] = len(lines)
        elif INSTRUCTION.match(line):
            lines.append(line)
            target = BRANCH.search(line)
            if target and target.group(1) in labels:
                loops.append((labels[target.group(1)], len(lines)))
    found = [(a, b) for a, b in loops if any(MATRIX_CODE.search(line) for line in lines[a:b])]
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
    outer = [(a, b) for a, b in found if not any(c <= a and b <= d and (a, b) != (c, d) for c, d in found)]
    return [lines[a:b] for a, b in outer], [lines[a:b] for a, b in inner]


def waits_for_all(loop: list[str]) -> bool:
    """Whether a loop starts its copies after the last matrix instruction, and waits for all of them at once."""
    copies = [i for i, line in enumerate(loop) if "LDGSTS" in line]
    last = max(i for i, line in enumerate(loop) if MATRIX_CODE.search(line))
    return bool(copies) and copies[0] > last and any(re.search(r"DEPBAR\.LE SB0, 0x0\b", line) for line in loop)


def zero_products(ttir: str) -> int:
    """Products in parts of an operand that was widened from bfloat16: its lower parts are zero.

    Float16 may be widened: its range is too small for what it is multiplied with.
    """
    widened = set(re.findall(r"(%\w+) = arith\.extf .*xbf16> to", ttir))
    products = re.findall(r"tt\.dot (%\w+), (%\w+),.*inputPrecision = (?:bf16x|tf32x)", ttir)
    return sum(bool(widened & set(operands)) for operands in products)


def _nvidia(tool: str, cubin: bytes, *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        return subprocess.run([program, *options, file], check=True, capture_output=True, text=True).stdout


def _sass(cubin: bytes) -> str:
    return _nvidia("nvdisasm", cubin, "-c", "-ndf")


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    shown = _nvidia("cuobjdump", cubin, "--dump-resource-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert usage, shown
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
    if result.two_bytes > FEW:
        found.append(f"{result.two_bytes} loads of two bytes")
    if result.zero_products:
        found.append(f"{result.zero_products} products with an operand that is zero by construction")
    if result.late_copies:
        found.append(f"{result.late_copies} loops wait for all copies after their last matrix instruction")
    return found


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def solve(system: System, v: Tensor, beta: bool) -> None:
    """Forward and backward."""
    y, z = torch.empty_like(v), torch.empty_like(v) if beta else None
    triton_solve.forward(system, v, y, z)
    dk_past, dy_past, dbeta = (
        None if x is None else torch.empty_like(x) for x in (system.k_past, system.y_past, system.beta)
    )
    out = Gradients(torch.empty_like(v), torch.empty_like(system.k), dk_past, dy_past, dbeta, None)
    triton_solve.backward(system, v, y, z, out)


def plain(dtype: torch.dtype, size: int) -> None:
    k, v = (empty(1, 8, T, size, dtype=dtype) for _ in range(2))
    k_past, y_past = (empty(1, 8, S, size, dtype=dtype) for _ in range(2))
    solve(System(k, k_past, y_past, sharpness=8.0), v, False)


def packed(dtype: torch.dtype, size: int) -> None:
    k, v = (empty(1, 8, T, size, dtype=dtype) for _ in range(2))
    mask = empty(1, T, dtype=torch.bool)
    borders, beta = empty(4, dtype=torch.int32), empty(1, 8, T, dtype=dtype)
    solve(System(k, key_mask=mask, cu_seqlens=borders, beta=beta, sharpness=8.0), v, True)


def step(dtype: torch.dtype, size: int) -> None:
    """Growing caches, preallocated buffers and pages."""
    q, k, v = empty(2, 32, 1, size, dtype=dtype), empty(2, 8, T, size, dtype=dtype), empty(2, 8, 1, size, dtype=dtype)
    norms, y = empty(2, 8, T, dtype=torch.float32), empty(2, 8, T - 1, size, dtype=dtype)
    c, mask = empty(16, 1, 1, dtype=torch.float32), empty(2, T, dtype=torch.bool)
    beta, position = empty(2, 8, 1, dtype=dtype), empty(1, dtype=torch.int64)
    pages, sizes = empty(64, 8, 16, size, dtype=dtype), empty(64, 8, 16, dtype=torch.float32)
    lengths, table = empty(2, dtype=torch.int64), empty(2, 32, dtype=torch.int32)
    growing = Token(q, k, v, y, norms, None, None, "key", c, 1.0, 0.1, None)
    buffer = Token(q, k, v, k, norms, mask, beta, "qk", c, 1.0, 0.1, position)
    paged = Token(q, pages, v, pages, sizes, None, None, "key", c, 1.0, 0.1, lengths)
    triton_decode.step(growing, torch.empty_like(v), torch.empty_like(q))
    triton_decode.step(buffer, torch.empty_like(v), torch.empty_like(q))
    triton_decode.step(paged, pages, torch.empty_like(q), table)


def path(dtype: torch.dtype, size: int) -> None:
    """PaTH and LUCID-PaTH, forward and backward: with a past, and with a learned sharpness."""
    q = empty(1, 16, T, size, dtype=dtype)
    k, v, k_past, y_past = (empty(1, 8, length, size, dtype=dtype) for length in (T, T, S, S))
    w, beta, norms = (empty(1, 8, *shape, dtype=torch.float32) for shape in ((T, size), (T,), (S,)))
    c = empty(1, 8, dtype=torch.float32)
    for solves in (False, True):
        behind = PathSystem(q, k, v, w, beta, k_past, y_past, norms if solves else None, sharpness=8.0, solves=solves)
        alone = PathSystem(q, k, v, w, beta, sharpness=c if solves else 8.0, solves=solves)
        for system in (behind, alone):
            made = triton_pass.forward(system)
            triton_pass.backward(system, made, made[0], made[2])


def path_step(dtype: torch.dtype, size: int) -> None:
    q, k, v = empty(2, 32, 1, size, dtype=dtype), empty(2, 8, T, size, dtype=dtype), empty(2, 8, 1, size, dtype=dtype)
    y_past, norms = empty(2, 8, T - 1, size, dtype=dtype), empty(2, 8, T, dtype=torch.float32)
    w, beta, product = (empty(2, 8, *shape, dtype=torch.float32) for shape in ((1, size), (1,), (size, size)))
    mask, pending = empty(2, T, dtype=torch.bool), T // 2
    for inverse_norms, key_mask in ((None, None), (norms, mask)):
        token = Token(q, k, v, y_past, inverse_norms, key_mask, None, "key", 8.0, 1.0, 0.1, None)
        live = empty(2, 8, T - 1 - pending, size, dtype=torch.float32)
        made = PathDecoded(q, v, empty(2, 8, T - pending, size, dtype=torch.float32), product)
        path_triton_decode.step(token, w, beta, product, live, pending, made)


# A case is a function of dtype and head size. Add one for a new operator.
OPERATORS: tuple[Callable[[torch.dtype, int], None], ...] = (plain, packed, step, path, path_step)


def name_of(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else "16 bit"


Table = dict[str, dict[tuple[str, str, int], list[tuple[Launch, Compiled]]]]


def check(architectures: list[str], word: str, say: Callable[[str], None]) -> tuple[Table, int]:
    """{kernel: {(architecture, dtype, D): what was compiled}} and the number of kernels at fault."""
    table: Table = defaultdict(lambda: defaultdict(list))
    broken = 0
    for architecture in architectures:
        results: dict[Launch, Compiled] = {}
        while True:
            launches = launched(architecture, word)
            spilling = compile_all(architecture, launches, results, say)
            if not spilling:
                break
            let_use_all_registers(architecture, spilling)
            say(f"{architecture}: these spill, and may use all registers from now on: {', '.join(sorted(spilling))}")
        used = {launch for each in launches.values() for launch in each}
        for launch in used:
            if wrong := faults(results[launch], architecture):
                broken += 1
                variant = {name: value for name, value in launch.constants if value not in ("", None)}
                say(f"{architecture} {launch.name}: {'; '.join(wrong)}\n    {launch.signature[0]} {variant}")
        for (dtype, size), each in launches.items():
            for launch in each:
                table[launch.name][architecture, name_of(dtype), size].append((launch, results[launch]))
        say(f"{architecture}: {len(used)} kernels compiled; at fault so far: {broken}")
    return table, broken


def launched(architecture: str, word: str) -> dict[tuple[torch.dtype, int], list[Launch]]:
    """The kernels of every operator by dtype and head size, each once. Dtypes and sizes may share kernels."""
    found = {}
    for dtype in DTYPES:
        for size in SIZES:
            calls = [partial(operator, dtype, size) for operator in OPERATORS]
            names = [launch for call in calls for launch in recorded(architecture, call) if word in launch.name]
            found[dtype, size] = list(dict.fromkeys(names))
    return found


def compile_all(
    architecture: str,
    launches: dict[tuple[torch.dtype, int], list[Launch]],
    results: dict[Launch, Compiled],
    say: Callable[[str], None],
) -> set[str]:
    """Compile what has no result yet. Names of kernels that spill although they may not use all registers yet."""
    spilling = set()
    for (dtype, size), each in launches.items():
        for launch in each:
            if launch not in results:
                results[launch] = compiled(launch, architecture)
            if results[launch].stack and not launch.most_registers and architecture.startswith("sm_"):
                spilling.add(launch.name)
        say(f"{architecture}, {dtype}, D = {size}: {len(results)} kernels")
    return spilling


def let_use_all_registers(architecture: str, kernels: set[str]) -> None:
    """Write kernels to the table of `ops/triton_tiles.py`."""
    known = triton_tiles.SPILLING
    names = {name.removesuffix("_kernel") for name in kernels}
    known[architecture] = " ".join(sorted({*known.get(architecture, "").split(), *names}))
    file = Path(triton_tiles.__file__)
    rows = [f'    "{name}": "{known[name]}",\n' for name in sorted(known, key=list(TARGETS).index)]
    text, count = re.subn(r"(?<=SPILLING = \{\n)[^}]*", lambda match: "".join(rows), file.read_text())
    assert count == 1, f"{file.name} has no table"
    file.write_text(text)


def entry(found: list[tuple[Launch, Compiled]]) -> str | None:
    if not found:
        return None
    registers = max(result.registers for _, result in found)
    shared = max(result.shared for _, result in found)
    warps = "–".join(str(x) for x in sorted({launch.warps for launch, _ in found}))
    stages = "–".join(str(x) for x in sorted({launch.stages for launch, _ in found}))
    return f"{registers} / {-(-shared // 1024)} / {warps} / {stages}"


def record(table: Table) -> dict[str, Any]:
    """What records/gpu/kernels.json keeps."""
    columns = [(dtype, size) for dtype in ("16 bit", "float32") for size in SIZES]
    kernels: dict[str, Any] = {}
    for kernel, entries in table.items():
        kernels[kernel] = {}
        for architecture in TARGETS:
            found = {column: entries.get((architecture, *column), []) for column in columns}
            used = sorted({result.instruction for results in found.values() for _, result in results} - {""})
            cells = {f"{dtype}, D = {size}": entry(results) for (dtype, size), results in found.items()}
            kernels[kernel][architecture] = {"instruction": used, **cells}
    text = "registers / KB of shared memory / warps / pipeline stages"
    return {"written_by": "tools/gpu_offline.py", "triton": triton.__version__, "entry": text, "kernels": kernels}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--kernels", default="", metavar="WORD")
    arguments = parser.parse_args()
    table, broken = check(arguments.only, arguments.kernels, lambda line: print(line, flush=True))
    if not broken and not arguments.kernels and len(arguments.only) == len(TARGETS):
        RECORD.write_text(json.dumps(record(table), indent=1, ensure_ascii=False) + "\n")
        print(f"{RECORD.name} written")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
