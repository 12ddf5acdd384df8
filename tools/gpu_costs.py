"""Predict what the kernels cost on GPUs that are not here, and write docs/gpu_costs.md and records/gpu/costs.json.

The launches are those of the library, recorded on the meta device, and their kernels are compiled. Each is charged the
longest of what its programs issue, multiply and read from L2, of its traffic, or of one program, and a gap. After
`tools/gpu_offline.py` it needs a few minutes.

    python tools/gpu_costs.py "H100 SXM"     that GPU alone, with every kernel's share; writes nothing
"""

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# `python tools/gpu_costs.py` finds its neighbour by this folder.
sys.path.insert(0, str(Path(__file__).parent))
from gpu_offline import Call, Compiled, Launch, calls, compiled, empty, launch_of

from lucid_attention.ops.lucid import triton_solve
from lucid_attention.ops.lucid.system import System
from lucid_attention.ops.path import triton_pass
from lucid_attention.ops.path.system import PathSystem

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "gpu_costs.md", ROOT / "records" / "gpu" / "costs.json"
# Products of 16-bit pieces that one product costs; a 16-bit operand is exact.
PIECES = {"": 1, "bf16x3": 3, "bf16x6": 6, "tf32x3": 6, "ieee": 16}
# What is reached of the resource that limits a kernel, and by flash attention of the dense rate.
EFFICIENCY = 0.6
GAP_SECONDS = 2e-6
# What the host needs for a launch by Triton, and for an operation of torch, without a CUDA graph.
HOST_SECONDS, TORCH_SECONDS = 20e-6, 5e-6
# What can limit a launch: slots of instructions, matrix units, L2, other arithmetic, memory; and the longest of them.
LIMITS = ("issue", "tensor", "L2", "vector", "memory", "ms")
# Instructions of different warps that a processor issues per clock.
ISSUED = 4


@dataclass(frozen=True)
class Gpu:
    """Vendor's figures: dense bfloat16 and float32 (no tensor core) FLOP/s, bytes/s of the memory, processors, clock,
    and bytes per clock that a processor reads from L2 (of the B200: assumed, as H100)."""

    architecture: str
    matrix: float
    vector: float
    memory: float
    processors: int
    clock: float
    l2: float


GPUS = {
    "A100 80 GB": Gpu("sm_80", 312e12, 19.5e12, 2.04e12, 108, 1.41e9, 47),
    "H100 SXM": Gpu("sm_90", 989e12, 67e12, 3.35e12, 132, 1.83e9, 39),
    "B200": Gpu("sm_100", 2250e12, 75e12, 8.0e12, 148, 1.85e9, 39),
    "MI300X": Gpu("gfx942", 1307e12, 163e12, 5.3e12, 304, 2.1e9, 54),
}


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, key/value and query heads, head size."""

    name: str
    B: int
    H: int
    queries: int
    T: int
    D: int

    @property
    def title(self) -> str:
        return f"{self.name}: B = {self.B}, {self.H}/{self.queries} heads, T = {self.T}, D = {self.D}"


SHAPES = (
    Shape("authors' kernel benchmark", 1, 8, 8, 8192, 128),
    Shape("8 heads, 32K", 1, 8, 8, 32768, 128),
    Shape("paper's 1B, 2K × 8", 8, 4, 32, 2048, 68),
    Shape("paper's 1B, 32K", 1, 4, 32, 32768, 68),
    Shape("paper's 32 heads of 64, 8K", 1, 32, 32, 8192, 64),
    Shape("32/4 heads of 64, 64K", 1, 4, 32, 65536, 64),
)
PATH_SHAPES = (SHAPES[0], SHAPES[2], SHAPES[3])


@dataclass(frozen=True)
class Cost:
    """Of one program: iterations of its outermost loop with products, and in each iterations of the loops inside;
    in all of them FLOP of products of 16-bit pieces, and bytes from L2.

    vector: float32 FLOP of what has no products; traffic: bytes that no other program of the launch reads.
    """

    iterations: float = 0
    inner: float = 0
    matrix: float = 0
    l2: float = 0
    vector: float = 0
    traffic: float = 0


def update(a: dict[str, Any]) -> Cost:
    rows, columns, features, width = a["ROWS"], a["source_end"] - a["source"], a["FEATURES"], a["WIDTH"]
    size = a["solved"].element_size()
    parts = PIECES[a["PRECISION"]] if size == 4 else 2 + a["LOWER"]
    again = a["PIECE"] < features
    moved = columns * (size * width + 2 * features) + again * rows * 2 * features * columns / a["COLUMNS"]
    matrix = 2 * rows * columns * (features + width * parts)
    traffic = rows * (8 * width + 2 * features)
    return Cost(columns / a["COLUMNS"], features / a["PIECE"] - 1, matrix, moved, 0, traffic)


def key_gradient(a: dict[str, Any]) -> Cost:
    """Of half of the columns y is read, of the other half g: in 16 bit all products have one part."""
    rows, columns, features, values = a["ROWS"], a["P"], a["FEATURES"], a["VALUES"]
    again = (a["PIECE"] < features) * 2 * features + (a["WIDTH"] < values) * 2 * values
    moved = columns * 2 * (features + a["OUT"] + values) + rows * again * columns / a["COLUMNS"]
    inner = features / a["PIECE"] + values / a["WIDTH"] - 2
    matrix = 2 * rows * columns * (features + values + a["OUT"])
    return Cost(columns / a["COLUMNS"], inner, matrix, moved, 0, rows * (2 * features + 4 * a["OUT"] + 4 * values))


def solve(a: dict[str, Any]) -> Cost:
    block, width, columns = a["BLOCK"], a["WIDTH"], (a["tiles"] + 1) / 2 * a["BLOCK"]
    matrix = 2 * block * columns * width * PIECES[a["INVERSE"]]
    return Cost(columns / a["COLUMNS"], 0, matrix, 4 * columns * (block + width), 0, block * 10 * width)


def blocks(a: dict[str, Any]) -> Cost:
    """Half of them have nothing to do."""
    block = a["BLOCK"]
    return Cost(0, 0, block * block * a["FEATURES"], 2 * block * a["FEATURES"], 5 * block**2, 2 * block**2)


def inverse(a: dict[str, Any]) -> Cost:
    """Of blocks of 64: what four warps could do in the slots of their 3300 instructions."""
    return Cost(vector=3300 * 64 * a["SIZE"] / 16, traffic=8 * a["SIZE"] ** 2)


def copy(a: dict[str, Any]) -> Cost:
    source, result = (a["k"], a["keys"]) if "k" in a else (a["v"], a["values"])
    return Cost(traffic=a["ROWS"] * a["PIECE"] * (source.element_size() + result.element_size()))


def product(a: dict[str, Any]) -> Cost:
    rows, columns, depth = a["ROWS"], a["COLUMNS"], a["depth"]
    if a["A_LOWER"] or a["B_LOWER"]:
        depth = (depth + (rows if a["A_LOWER"] else columns)) / 2
    matrix = 2 * rows * columns * depth * PIECES[a["PRECISION"]]
    # The programs of a row of tiles share what they read on the left, those of a column what they read on the right.
    across, along = a["b"].shape[-1] / columns, a["a"].shape[-2] / rows
    traffic = 4 * (rows * columns * (1 + a["ADDS"]) + rows * depth / across + columns * depth / along)
    return Cost(depth / a["DEPTH"], 0, matrix, 4 * depth * (rows + columns), 0, traffic)


def path_rectangle(a: dict[str, Any], of_values: float, out: int) -> Cost:
    """of_values: products with values, as multiples of one with E' columns. Everything is float32 in memory."""
    rows, columns, features, values = a["ROWS"], a["sources"], a["FEATURES"], a["VALUES"]
    products = features * PIECES[a["PRECISION"]] + of_values * PIECES[a["PRODUCT"]]
    moved = 4 * (columns * (features + values) + rows * features * columns / a["COLUMNS"])
    traffic = 4 * rows * (features + values + 2 * out)
    return Cost(columns / a["COLUMNS"], features / a["PIECE"] - 1, 2 * rows * columns * products, moved, 0, traffic)


COSTS: dict[str, Callable[[dict[str, Any]], Cost]] = {
    "update_kernel": update,
    "key_gradient_kernel": key_gradient,
    "solve_kernel": solve,
    "blocks_kernel": blocks,
    "inverse_kernel": inverse,
    "pack_keys_kernel": copy,
    "pack_values_kernel": copy,
    "path_product_kernel": product,
    "path_apply_kernel": lambda a: path_rectangle(a, a["WIDTH"], a["WIDTH"]),
    "path_pull_kernel": lambda a: path_rectangle(a, a["VALUES"] + a["OUT"], a["OUT"]),
}


@dataclass(frozen=True)
class Total:
    """Of a pass: launches, FLOP in products of 16-bit pieces, bytes from L2 and from memory, seconds.

    kernels: by kernel, milliseconds if only one of LIMITS counted, and as charged.
    """

    launches: int
    matrix: float
    l2: float
    traffic: float
    seconds: float
    kernels: dict[str, dict[str, float]]


@cache
def machine_code(launch: Launch, architecture: str) -> Compiled:
    return compiled(launch, architecture, loops=True)


def total(found: list[Call], gpu: Gpu) -> Total:
    matrix = l2 = traffic = seconds = 0.0
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    clocks = gpu.processors * gpu.clock
    for call in found:
        constants = call.arguments["CONST"]._asdict() if "CONST" in call.arguments else {}
        cost = COSTS[call.kernel.__name__](call.arguments | constants)
        issue = 0.0
        if cost.iterations:
            code = machine_code(launch_of(call), gpu.architecture)
            issue = cost.iterations * (code.issued + cost.inner * code.inner) * call.warps / ISSUED
        programs = math.prod(call.grid)
        # Clocks of one program.
        limits = issue, cost.matrix * clocks / gpu.matrix, cost.l2 / gpu.l2, cost.vector * clocks / gpu.vector
        ms = [1e3 * limit / gpu.clock / EFFICIENCY for limit in limits]
        moved = programs * cost.traffic
        charged = max(math.ceil(programs / gpu.processors) * max(ms), 1e3 * moved / gpu.memory)
        each = [programs / gpu.processors * x for x in ms]
        parts = dict(zip(LIMITS, [*each, 1e3 * moved / gpu.memory, charged], strict=True))
        kernels[call.kernel.__name__].update({"launches": 1} | parts)
        seconds += GAP_SECONDS + charged / 1e3
        matrix, l2, traffic = matrix + programs * cost.matrix, l2 + programs * cost.l2, traffic + moved
    return Total(len(found), matrix, l2, traffic, seconds, {name: dict(each) for name, each in kernels.items()})


def forward(shape: Shape) -> None:
    k = empty(shape.B, shape.H, shape.T, shape.D, dtype=torch.bfloat16)
    triton_solve.forward(System(k, sharpness=8.0), k, torch.empty_like(k), None)


def backward(shape: Shape) -> None:
    k = empty(shape.B, shape.H, shape.T, shape.D, dtype=torch.bfloat16)
    out = triton_solve.Gradients(torch.empty_like(k), torch.empty_like(k), None, None, None, None)
    triton_solve.backward(System(k, sharpness=8.0), k, k, None, out)


class TorchWork(TorchDispatchMode):
    """Counts torch's own operations, the bytes that they read and write, and the FLOP of flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.traffic, self.flop = 0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # What a new tensor is modelled on is not read.
        read = () if "::new_" in func.name() else (args, kwargs)
        tensors = [x for x in tree_leaves((*read, out)) if isinstance(x, Tensor)]
        if tensors and not func.is_view and "empty" not in func.name() and func.name() != "aten::detach":
            if "flash_attention" in func.name():
                backward = "backward" in func.name()
                q, k = args[backward : backward + 2]
                self.flop += (10 if backward else 4) * q.numel() * k.shape[2]
            self.operations += 1
            self.traffic += sum(x.numel() * x.element_size() for x in tensors)
        return out


def path_pass(shape: Shape, solves: bool, gradient: bool) -> None:
    """PaTH or LUCID-PaTH, read-out included. The launches of a backward are those of `triton_pass.backward` alone."""
    q = empty(shape.B, shape.queries, shape.T, shape.D, dtype=torch.bfloat16)
    k = empty(shape.B, shape.H, shape.T, shape.D, dtype=torch.bfloat16)
    w, beta = k.float(), empty(shape.B, shape.H, shape.T, dtype=torch.float32)
    system = PathSystem(q, k, k, w, beta, sharpness=8.0, solves=solves)
    if gradient:
        made = q, beta.new_empty(q.shape[:3]), k if solves else None
        triton_pass.backward(system, made, q, None)
    else:
        triton_pass.forward(system)


def flash(shape: Shape, gpu: Gpu, products: int) -> float:
    """Seconds of flash attention of `products` matrix products per pair: 2 forward, 5 backward."""
    flop = products * 2 * shape.B * shape.queries * shape.T**2 / 2 * shape.D
    return flop / (EFFICIENCY * gpu.matrix)


HEAD = """# What the Triton kernels should cost: a model, not a measurement

Written by `python tools/gpu_costs.py`. **Nobody has run these kernels on a GPU yet.** `records/gpu/costs.json` has
launches, arithmetic, traffic and times of every cell.

The launches of the library are recorded without a GPU, and their kernels are compiled. Each launch is charged
{gap:g} µs (the gap in a CUDA graph) and the longest of: the instructions that its programs issue, from the machine
code; their products at the vendor's dense rate; their bytes from L2; each of the three at {efficiency:.0%}, in whole
rounds of one program per processor; and its traffic at the vendor's bandwidth. Head sizes are padded to a power of two:
68 costs as much as 128. Flash attention is charged {efficiency:.0%} of the dense rate.

A cell is the time over that of flash attention of the same shape, forward / backward, in bfloat16. LUCID is the solve
and flash attention. Host: milliseconds of the CPU without a CUDA graph ({host:g} µs for a launch of Triton, {torch:g}
µs for an operation of torch); where it is longer, it decides. The authors published for the solve by their own kernels
(CuTe, GH200, 8 heads of 128 at 8K): forward 1.46 ms against 0.43 ms of flash attention 3 (a ratio of 4.4), backward
3.01 ms against 0.90 ms (4.3).
"""

PATH_NOTE = """PaTH and LUCID-PaTH contain the read-out: torch's flash attention for every level of the tree. Torch's
other operations between the kernels are charged {gap:g} µs each and their traffic.
"""


def lucid_record(shape: Shape, gpu: Gpu, gradient: bool) -> dict[str, Any]:
    """The solve and flash attention, over flash attention."""
    with TorchWork() as work:
        found = calls(gpu.architecture, partial(backward if gradient else forward, shape))
    other = flash(shape, gpu, 5 if gradient else 2)
    return record(total(found, gpu), work, gpu, other, other)


def path_record(shape: Shape, gpu: Gpu, gradient: bool, solves: bool) -> dict[str, Any]:
    """The whole pass over flash attention, which knows no positions."""
    with TorchWork() as work:
        found = calls(gpu.architecture, partial(path_pass, shape, solves, gradient))
    return record(total(found, gpu), work, gpu, flash(shape, gpu, 5 if gradient else 2), 0.0)


def record(cost: Total, work: TorchWork, gpu: Gpu, other: float, more: float) -> dict[str, Any]:
    """other: seconds of flash attention; more: seconds of the read-out that are not among the launches."""
    torch_seconds = work.operations * GAP_SECONDS + work.traffic / gpu.memory + work.flop / (EFFICIENCY * gpu.matrix)
    seconds = cost.seconds + torch_seconds
    return {
        "launches": cost.launches,
        "torch_operations": work.operations,
        "tflop": round((cost.matrix + work.flop) / 1e12, 3),
        "l2_gigabytes": round(cost.l2 / 1e9, 3),
        "gigabytes": round((cost.traffic + work.traffic) / 1e9, 3),
        "ms": round(seconds * 1e3, 3),
        "host_ms": round((cost.launches * HOST_SECONDS + work.operations * TORCH_SECONDS) * 1e3, 2),
        "flash_ms": round(other * 1e3, 3),
        "ratio": round((seconds + more) / other, 3),
        "kernels": {name: {k: round(v, 4) for k, v in each.items()} for name, each in cost.kernels.items()},
    }


def records(names: list[str]) -> list[dict[str, Any]]:
    """One per attention, shape, GPU and pass."""
    cases = [("LUCID", shape, lucid_record) for shape in SHAPES]
    for attention, solves in (("PaTH", False), ("LUCID-PaTH", True)):
        cases += [(attention, shape, partial(path_record, solves=solves)) for shape in PATH_SHAPES]
    return [
        {
            "attention": attention,
            "shape": shape.name,
            "gpu": name,
            "pass": "backward" if gradient else "forward",
            **run(shape, gpu, gradient),
        }
        for attention, shape, run in cases
        for name, gpu in GPUS.items()
        if name in names
        for gradient in (False, True)
    ]


def page(found: list[dict[str, Any]]) -> str:
    head = HEAD.format(gap=GAP_SECONDS * 1e6, efficiency=EFFICIENCY, host=HOST_SECONDS * 1e6, torch=TORCH_SECONDS * 1e6)
    cells = {(each["attention"], each["shape"], each["gpu"], each["pass"]): each for each in found}
    lines = [head, f"| attention | shape | {' | '.join(GPUS)} | host, ms |", "|---|---|" + "---|" * (len(GPUS) + 1)]
    for attention, name in dict.fromkeys((each["attention"], each["shape"]) for each in found):
        both = [[cells[attention, name, gpu, part] for part in ("forward", "backward")] for gpu in GPUS]
        ratios = [f"{first['ratio']:.2f} / {second['ratio']:.2f}" for first, second in both]
        host = f"{both[1][0]['host_ms']:.1f} / {both[1][1]['host_ms']:.1f}"
        lines.append(f"| {attention} | {name} | {' | '.join(ratios)} | {host} |")
    shapes = [f"- {shape.title}" for shape in SHAPES]
    note = PATH_NOTE.format(gap=GAP_SECONDS * 1e6)
    return "\n".join([*lines, "", "Heads are key/value and query heads:", "", *shapes, "", note]).rstrip() + "\n"


def main() -> None:
    names = [name for name in GPUS if not sys.argv[1:] or name in sys.argv[1:]]
    found = records(names)
    if len(names) < len(GPUS):
        for each in found:
            print(json.dumps(each))
        return
    kept = [{name: value for name, value in each.items() if name != "kernels"} for each in found]
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    PAGE.write_text(page(found))
    print(f"{PAGE.name} and {RECORD.name} written")


if __name__ == "__main__":
    main()
