"""Predict what the kernels cost on GPUs that are not here, and write docs/gpu_costs.md and records/gpu/costs.json.

The launches are those of the library, recorded on the meta device; each is charged its arithmetic, its traffic or one
program's time, whichever is longest, and a gap.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# `python tools/gpu_costs.py` finds its neighbour by this folder.
sys.path.insert(0, str(Path(__file__).parent))
from gpu_offline import Call, calls, empty

from lucid_attention.ops.lucid import triton_solve
from lucid_attention.ops.lucid.system import System
from lucid_attention.ops.path import triton_pass
from lucid_attention.ops.path.system import PathSystem

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "gpu_costs.md", ROOT / "records" / "gpu" / "costs.json"
# Products of bfloat16 pieces that one product costs.
PIECES = {"bf16x3": 3, "bf16x6": 6, "tf32x3": 6, "ieee": 16}
EFFICIENCY = 0.5
FLASH_EFFICIENCY = 0.6
GAP_SECONDS = 2e-6


@dataclass(frozen=True)
class Gpu:
    """Vendor's figures: dense bfloat16 and float32 (no tensor core) FLOP/s, bytes/s, processors."""

    architecture: str
    matrix: float
    vector: float
    memory: float
    processors: int


GPUS = {
    "A100 80 GB": Gpu("sm_80", 312e12, 19.5e12, 2.04e12, 108),
    "H100 SXM": Gpu("sm_90", 989e12, 67e12, 3.35e12, 132),
    "B200": Gpu("sm_100", 2250e12, 75e12, 8.0e12, 148),
    "MI300X": Gpu("gfx942", 1307e12, 163e12, 5.3e12, 304),
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
        heads = f"{self.H} key/value and {self.queries} query heads"
        return f"{self.name}: B = {self.B}, {heads}, T = {self.T}, D = {self.D}"


SHAPES = (
    Shape("authors' kernel benchmark", 1, 8, 8, 8192, 128),
    Shape("8 heads, 32K", 1, 8, 8, 32768, 128),
    Shape("paper's 1B, 2K × 8", 8, 4, 32, 2048, 68),
    Shape("paper's 1B, 32K", 1, 4, 32, 32768, 68),
    Shape("paper's 32 heads of 64, 8K", 1, 32, 32, 8192, 64),
)
PATH_SHAPES = (SHAPES[0], SHAPES[2], SHAPES[3])


@dataclass(frozen=True)
class Cost:
    """Of one program: bfloat16 products as FLOP, float32 FLOP, bytes that no other program of the launch reads."""

    matrix: float
    vector: float
    traffic: float


def update(a: dict[str, Any], keys: int, values: int) -> Cost:
    pairs = a["ROWS"] * (a["source_end"] - a["source"])
    matrix = pairs * (2 * a["FEATURES"] + 2 * a["WIDTH"] * PIECES[a["PRODUCT"]])
    return Cost(matrix, 10 * pairs, a["ROWS"] * (8 * a["WIDTH"] + keys * a["FEATURES"]))


def key_gradient(a: dict[str, Any], keys: int, values: int) -> Cost:
    pairs = a["ROWS"] * a["P"]
    products = 2 * a["FEATURES"] + 2 * a["VALUES"] * PIECES[a["PRODUCT"]] + 2 * a["OUT"] * PIECES[a["GRADIENT"]]
    return Cost(pairs * products, 16 * pairs, a["ROWS"] * (keys * a["FEATURES"] + 4 * a["OUT"] + 6 * a["VALUES"]))


def solve(a: dict[str, Any], keys: int, values: int) -> Cost:
    block, width = a["BLOCK"], a["WIDTH"]
    matrix = 1.5 * block * block * 2 * width * PIECES[a["INVERSE"]]
    return Cost(matrix, 0, block * (6 * block + width * (8 + values)))


def inverse(a: dict[str, Any], keys: int, values: int) -> Cost:
    block = a["BLOCK"]
    return Cost(2 * block * block * a["FEATURES"], 4 * block**3, block * (keys * a["FEATURES"] + 4 * block))


def merge(a: dict[str, Any], keys: int, values: int) -> Cost:
    block, width = a["BLOCK"], a["COLUMNS"]
    matrix = 2 * block * block * (a["FEATURES"] + 2 * width * PIECES[a["INVERSE"]])
    return Cost(matrix, 0, block * (keys * a["FEATURES"] + 8 * block))


def copy(a: dict[str, Any], keys: int, values: int) -> Cost:
    return Cost(0, 0, a["ROWS"] * (a.get("FEATURES") or a.get("PIECE") or a.get("PADDED", 0)) * (keys + 4))


def path_product(a: dict[str, Any], keys: int, values: int) -> Cost:
    """Everything of PaTH is float32 in memory."""
    tile = a["ROWS"] * a["COLUMNS"]
    matrix = 2 * tile * a["depth"] * PIECES[a["PRECISION"]]
    return Cost(matrix, 0, 4 * (tile * (1 + a["ADDS"]) + a["ROWS"] * a["depth"]))


def path_inverse(a: dict[str, Any], keys: int, values: int) -> Cost:
    return Cost(0, 4 * a["BLOCK"] ** 3, 8 * a["BLOCK"] ** 2)


def path_rectangle(a: dict[str, Any], keys: int, values: int) -> Cost:
    """Scores and products with values, of the read-out (attend) or of the solve (apply)."""
    pairs = a["ROWS"] * a["sources"]
    products = a["FEATURES"] * PIECES[a["PRECISION"]] + a["WIDTH"] * PIECES[a["PRODUCT"]]
    return Cost(2 * pairs * products, 10 * pairs, 4 * a["ROWS"] * (a["FEATURES"] + 2 * a["WIDTH"]))


def path_pull(a: dict[str, Any], keys: int, values: int) -> Cost:
    pairs = a["ROWS"] * a["sources"]
    products = a["FEATURES"] * PIECES[a["PRECISION"]] + (a["VALUES"] + a["OUT"]) * PIECES[a["PRODUCT"]]
    return Cost(2 * pairs * products, 16 * pairs, 4 * a["ROWS"] * (a["FEATURES"] + a["VALUES"] + 2 * a["OUT"]))


COSTS: dict[str, Callable[[dict[str, Any], int, int], Cost]] = {
    "update_kernel": update,
    "key_gradient_kernel": key_gradient,
    "solve_kernel": solve,
    "inverse_kernel": inverse,
    "merge_kernel": merge,
    "pack_keys_kernel": copy,
    "pack_values_kernel": copy,
    "project_kernel": copy,
    "path_product_kernel": path_product,
    "path_inverse_kernel": path_inverse,
    "path_attend_kernel": path_rectangle,
    "path_apply_kernel": path_rectangle,
    "path_pull_kernel": path_pull,
}


@dataclass(frozen=True)
class Total:
    """Of a pass: launches, FLOP in bfloat16 products, bytes, seconds, and seconds with one program per launch."""

    launches: int
    matrix: float
    traffic: float
    seconds: float
    chain: float


def total(found: list[Call], gpu: Gpu) -> Total:
    matrix = traffic = seconds = chain = 0.0
    for call in found:
        constants = call.arguments["CONST"]._asdict() if "CONST" in call.arguments else {}
        cost = COSTS[call.kernel.__name__](call.arguments | constants, 2, 2)
        programs = math.prod(call.grid)
        one = cost.matrix / (EFFICIENCY * gpu.matrix / gpu.processors)
        one += cost.vector / (EFFICIENCY * gpu.vector / gpu.processors)
        rounds = math.ceil(programs / gpu.processors)
        moved = programs * cost.traffic
        seconds += GAP_SECONDS + max(rounds * one, moved / gpu.memory)
        chain += GAP_SECONDS + one
        matrix += programs * cost.matrix
        traffic += moved
    return Total(len(found), matrix, traffic, seconds, chain)


def forward(shape: Shape) -> None:
    k = empty(shape.B, shape.H, shape.T, shape.D, dtype=torch.bfloat16)
    triton_solve.forward(System(k, sharpness=8.0), k, torch.empty_like(k), None)


def backward(shape: Shape) -> None:
    k = empty(shape.B, shape.H, shape.T, shape.D, dtype=torch.bfloat16)
    out = triton_solve.Gradients(torch.empty_like(k), torch.empty_like(k), None, None, None, None)
    triton_solve.backward(System(k, sharpness=8.0), k, k, None, out)


class TorchWork(TorchDispatchMode):
    """Counts torch's own operations, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.traffic = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name() and func.name() != "aten::detach":
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
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
    return flop / (FLASH_EFFICIENCY * gpu.matrix)


HEAD = """# What the Triton kernels should cost: a model, not a measurement

Written by `python tools/gpu_costs.py`. **Nobody has run these kernels on a GPU yet.** `records/gpu/costs.json` has
launches, arithmetic, traffic and times of every cell.

The launches of the library are recorded without a GPU. Each is charged {gap:g} µs (the gap in a CUDA graph) and the
longest of its arithmetic, in whole rounds of one program per processor at {efficiency:.0%} of the vendor's dense
bfloat16 rate; its traffic at the vendor's bandwidth; one program alone. A product in bf16x3 counts three times, in
bf16x6 six times. Head sizes are padded to a power of two, so 68 costs as much as 128. Flash attention is charged
{flash:.0%} of the dense rate.

A cell is the time over that of flash attention of the same shape, forward / backward, in bfloat16. LUCID is the solve
and flash attention. The authors published for their own kernels (CuTe, GH200, 8 heads of 128 at 8K): forward 1.46 ms
against 0.43 ms of flash attention 3, backward 3.01 ms against 0.90 ms. This is the number to beat.
"""

PATH_NOTE = """The kernels of PaTH and LUCID-PaTH contain the read-out; everything is float32 in memory. Torch's
own operations between the kernels are charged {gap:g} µs each and their traffic.
"""


def lucid_record(shape: Shape, gpu: Gpu, gradient: bool) -> dict[str, float]:
    """The solve and flash attention, over flash attention."""
    cost = total(calls(gpu.architecture, partial(backward if gradient else forward, shape)), gpu)
    other = flash(shape, gpu, 5 if gradient else 2)
    return record(cost, 0, cost.traffic, cost.seconds, other, (cost.seconds + other) / other)


def path_record(shape: Shape, gpu: Gpu, gradient: bool, solves: bool) -> dict[str, float]:
    """The whole pass over flash attention, which knows no positions."""
    with TorchWork() as work:
        found = calls(gpu.architecture, partial(path_pass, shape, solves, gradient))
    cost = total(found, gpu)
    seconds = cost.seconds + work.operations * GAP_SECONDS + work.traffic / gpu.memory
    other = flash(shape, gpu, 5 if gradient else 2)
    return record(cost, work.operations, cost.traffic + work.traffic, seconds, other, seconds / other)


def record(
    cost: Total, operations: int, traffic: float, seconds: float, other: float, ratio: float
) -> dict[str, float]:
    """chain_ms: what remains with unlimited processors, because every launch waits for the one before it."""
    return {
        "launches": cost.launches,
        "torch_operations": operations,
        "tflop": round(cost.matrix / 1e12, 3),
        "gigabytes": round(traffic / 1e9, 3),
        "chain_ms": round(cost.chain * 1e3, 3),
        "ms": round(seconds * 1e3, 3),
        "flash_ms": round(other * 1e3, 3),
        "ratio": round(ratio, 3),
    }


def records() -> list[dict[str, Any]]:
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
        for gradient in (False, True)
    ]


def page(found: list[dict[str, Any]]) -> str:
    head = HEAD.format(gap=GAP_SECONDS * 1e6, efficiency=EFFICIENCY, flash=FLASH_EFFICIENCY)
    ratios = {(each["attention"], each["shape"], each["gpu"], each["pass"]): each["ratio"] for each in found}
    lines = [head, f"| attention | shape | {' | '.join(GPUS)} |", "|---|---|" + "---|" * len(GPUS)]
    for attention, name in dict.fromkeys((each["attention"], each["shape"]) for each in found):
        cells = (
            " / ".join(f"{ratios[attention, name, gpu, part]:.2f}" for part in ("forward", "backward")) for gpu in GPUS
        )
        lines.append(f"| {attention} | {name} | {' | '.join(cells)} |")
    shapes = [f"- {shape.title}" for shape in SHAPES]
    note = PATH_NOTE.format(gap=GAP_SECONDS * 1e6)
    return "\n".join([*lines, "", "The shapes:", "", *shapes, "", note]).rstrip() + "\n"


def main() -> None:
    found = records()
    RECORD.write_text("[\n" + ",\n".join(json.dumps(each) for each in found) + "\n]\n")
    PAGE.write_text(page(found))
    print(f"{PAGE.name} and {RECORD.name} written")


if __name__ == "__main__":
    main()
