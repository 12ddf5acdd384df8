"""The case `solve`: attention over a whole sequence, LUCID next to torch's softmax attention."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.lucid.api import lucid_attention, precondition

from . import harness
from .harness import Run, Shape, Spread, race, ratios
from .records import Case, Point, Result, Settings, Sizes

SDPA, LUCID, DENSE = "SDPA", "LUCID", "dense solve"
# The limit is this multiple of the ratio that the count of operations gives.
SLACK = 1.05
SHAPES = (Shape(64, 8, 8), Shape(64, 32, 4), Shape(128, 12, 2), Shape(256, 4, 1))
BF16_SHAPES = SHAPES[:2]
LENGTHS = {torch.float32: (1024, 2048, 4096, 8192, 16384), torch.bfloat16: (1024, 2048, 4096)}
QUICK_LENGTHS = (300,)
# Several blocks and a part of one.
GATE_LENGTH = 300
# Longest sequences of the dense solve, and of a gate at the length of the point, forward and forward+backward.
DENSE_LENGTH, GATE_LENGTHS = 4096, (4096, 2048)
PASSES = {False: "forward", True: "forward+backward"}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's causal softmax attention, which LUCID replaces. q: [B, H·G, T, D]; k, v: [B, H, T, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense_solve(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The defining equation: the whole matrix P and one triangular solve, then torch's attention."""
    # The solution is column-major, which makes torch's attention slow.
    return sdpa(q, k, precondition(k, v, impl="reference").contiguous())


# From q, k, v to the output. All but SDPA compute LUCID.
CONTESTANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    SDPA: sdpa,
    LUCID: lucid_attention,
    DENSE: dense_solve,
}


@cache
def check_truth(shape: Shape, N: int, backward: bool, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """Compare every contestant with the definition in float64: outputs and, if `backward`, all gradients."""
    tensors, where = harness.inputs(*shape, N, dtype), f"{shape}, N={N}"
    truths = [
        harness.evaluate(partial(harness.true_attention, solves=solves), tensors, backward) for solves in (False, True)
    ]
    harness.check_sharp(where, truths[1][0], truths[0][0], dtype)
    for name in names:
        harness.check(where, name, harness.evaluate(CONTESTANTS[name], tensors, backward), truths[name != SDPA])


def measure(
    shape: Shape,
    N: int,
    *,
    backward: bool,
    settings: Settings,
    dtype: torch.dtype = torch.float32,
    names: Sequence[str] = (SDPA, LUCID),
    limit: float | None = None,
) -> Result:
    """Race the contestants `names` at length N, after the gate. Ratios are "NAME / SDPA"."""
    names = tuple(names)
    check_truth(shape, GATE_LENGTH, backward, dtype, names)
    check_truth(Shape(shape.D, 1, 1), min(N, GATE_LENGTHS[backward]), backward, dtype, names)
    tensors = harness.inputs(*shape, N, dtype)
    runs: dict[str, Run] = {name: partial(harness.evaluate, CONTESTANTS[name], tensors, backward) for name in names}
    times = race(runs, budget=settings.budget, seed=f"{shape} {N}", brief={DENSE}, least=settings.least)
    main = f"{LUCID} / {SDPA}"
    return Result(
        seconds={name: Spread.of(times[name]) for name in names},
        ratios={f"{name} / {SDPA}": ratios(times[name], times[SDPA]) for name in names if name != SDPA},
        counted={main: shape.flop_ratio},
        limits={} if limit is None else {main: limit},
    )


def _points(settings: Settings) -> list[Point]:
    points = []
    for threads, dtype, shape, backward in product(settings.threads, LENGTHS, SHAPES, PASSES):
        first = threads == settings.threads[0]
        if dtype == torch.bfloat16 and (not first or shape not in BF16_SHAPES):
            continue
        limit: float | None = SLACK * shape.flop_ratio
        if dtype == torch.bfloat16:
            limit = shape.flop_ratio if backward else 1.5 if shape.heads > shape.kv_heads else None
        for N in QUICK_LENGTHS if settings.quick else LENGTHS[dtype]:
            dense = first and dtype == torch.float32 and N <= DENSE_LENGTH
            names = (SDPA, LUCID, DENSE) if dense else (SDPA, LUCID)
            name = str(dtype).removeprefix("torch.")
            sizes: Sizes = {"threads": threads, "dtype": name, "D": shape.D, "heads": shape.label}
            run = partial(
                measure, shape, N, backward=backward, settings=settings, dtype=dtype, names=names, limit=limit
            )
            points.append(Point({**sizes, "pass": PASSES[backward], "N": N}, run))
    return points


CASE = Case(
    "solve",
    f"Causal attention over a whole sequence, batch 1, against torch's SDPA (ratio 1). Up to N = {DENSE_LENGTH} the "
    "dense triangular solve takes part, with the first thread count. Counted: 1 + H_kv/H, the solve is one more "
    f"attention per key/value head. Limits: {SLACK} × counted in float32. In bfloat16, where the solve is float32 "
    "inside and the ratio depends on the CPU's 16-bit products: counted for forward+backward, 1.5 forward with "
    "grouped heads.",
    _points,
)
