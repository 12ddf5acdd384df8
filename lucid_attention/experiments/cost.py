"""What the operator costs against torch's own attention, by length: timed side by side on one thread."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.lucid.api import lucid_attention
from .engine.jobs import Job, Record, Work
from .engine.result import Figure, lines, series

LENGTHS = (512, 1024, 2048, 4096)
SDPA, LUCID, DENSE = "sdpa", "lucid", "dense"
NAMES = {
    SDPA: ("softmax attention (SDPA)", "softmax"),
    LUCID: ("LUCID", "lucid"),
    DENSE: ("LUCID, dense solve", "control"),
}
# Seconds of rounds at each length, and how many rounds there are at least. The dense solve sits out the others.
BUDGET, LEAST_ROUNDS, MOST_ROUNDS = 3.0, 3, 60
# The dense matrix and what its derivative needs are a few times as large as this.
DENSE_BYTES = 300e6
# ‖x − truth‖ / ‖truth‖ in float32; without the solve it is near 1.
TOLERANCE = 5e-5
CHECK_LENGTH = 200

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class WrongAnswer(Exception):
    """What was to be timed does not compute what it should."""


def cost_job(
    lengths: Sequence[int] = LENGTHS,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 64,
    backward: bool = False,
    label: str = "",
) -> Job:
    """`operator_cost` as a job: nothing runs beside it."""
    arguments = {
        "lengths": list(lengths),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "backward": backward,
    }
    what = label or f"cost {heads}/{kv_heads} heads, {'forward+backward' if backward else 'forward'}"
    turns = [_about_seconds(length, heads, kv_heads, head_dim, backward) for length in lengths]
    seconds = 1 + sum(max(BUDGET, LEAST_ROUNDS * turn) for turn in turns)
    return Job("cost:operator_cost", arguments, what, seconds, alone=True)


def _about_seconds(length: int, heads: int, kv_heads: int, head_dim: int, backward: bool) -> float:
    """One round, of a core that does 30 billion operations a second; the dense solve goes at a third of that."""
    operations = (7 if backward else 2) * length**2 * head_dim
    dense = 3 * kv_heads if _dense_fits(length, kv_heads) else 0
    return operations * (2 * heads + kv_heads + dense) / 30e9


def operator_cost(
    work: Work, lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, backward: bool
) -> Record:
    """The job: milliseconds by length of SDPA, LUCID and the dense solve, and LUCID over SDPA round by round.

    float32, batch 1. Before anything is timed, LUCID and the dense solve have to agree with the defining equation in
    float64, with all gradients, on correlated keys.
    """
    check_answers(heads, kv_heads, head_dim)
    gc.collect()
    milliseconds: dict[str, list[float | None]] = {name: [] for name in NAMES}
    found: dict[str, list[float]] = {"ratio": [], "ratio_low": [], "ratio_high": [], "rounds": []}
    for length in lengths:
        times = race(length, heads, kv_heads, head_dim, backward)
        for name, seconds in times.items():
            milliseconds[name].append(1000 * statistics.median(seconds) if seconds else None)
        ratios = [a / b for a, b in zip(times[LUCID], times[SDPA], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        for name, value in zip(found, (middle, low, high, len(ratios)), strict=True):
            found[name].append(value)
    return {"lengths": list(lengths), "milliseconds": milliseconds, "bound": 1 + kv_heads / heads, **found}


def race(length: int, heads: int, kv_heads: int, head_dim: int, backward: bool) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. They take turns, so a slow spell of the machine hits all of them."""
    tensors = _inputs(length, heads, kv_heads, head_dim)
    runs = {SDPA: sdpa, LUCID: lucid_attention, DENSE: dense_solve}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in (sdpa, lucid_attention):
        _evaluate(run, tensors, backward)  # libraries set up
    begun, done = time.perf_counter(), 0
    gc.disable()
    try:
        while done < LEAST_ROUNDS or (done < MOST_ROUNDS and time.perf_counter() - begun < BUDGET):
            for name, run in runs.items():
                if name == DENSE and (done >= LEAST_ROUNDS or not _dense_fits(length, kv_heads)):
                    continue
                start = time.perf_counter()
                result = _evaluate(run, tensors, backward)
                times[name].append(time.perf_counter() - start)
                del result  # freed outside of the measured time, for everybody
            done += 1
    finally:
        gc.enable()
    return times


def check_answers(heads: int, kv_heads: int, head_dim: int, attention: Attention = lucid_attention) -> None:
    """Nobody is timed who does not compute the right thing, in output and gradients."""
    tensors = _inputs(CHECK_LENGTH, heads, kv_heads, head_dim)
    truth = _evaluate(_reference, [x.double() for x in tensors], True)
    parts = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, run in ((LUCID, attention), (DENSE, dense_solve)):
        for part, got, expected in zip(parts, _evaluate(run, tensors, True), truth, strict=True):
            error = float((got.double() - expected).norm() / expected.norm())
            if not error <= TOLERANCE:  # NaN is wrong too
                raise WrongAnswer(
                    f"{NAMES[name][0]}, {heads}/{kv_heads} heads of {head_dim}: the {part} is {error:.2g} away from "
                    f"the defining equation in float64 (relative; allowed {TOLERANCE:g}). Nothing was timed"
                )


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's causal softmax attention: what LUCID replaces."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense_solve(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the paper's text has it: the whole matrix P, one triangular solve, then attention."""
    root = math.sqrt(k.shape[-1])
    k_rn = root * F.normalize(k, dim=-1)
    P = (k_rn @ k_rn.mT / root - root).exp()
    y = torch.linalg.solve_triangular(P, v, upper=False, unitriangular=True)
    # The solution is column-major, which torch's attention does not like.
    return sdpa(q, k, y.contiguous())


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lucid_attention(q, k, v, impl="reference")


def _inputs(length: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """q, k, v, and the gradient of the output. The keys of a head share a mean: their cosines are about 0.86."""
    random = torch.Generator().manual_seed(length)
    q, do = (torch.randn(1, heads, length, head_dim, generator=random) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, length, head_dim, generator=random) for _ in range(2))
    return [q, k + 2.5 * torch.randn(1, kv_heads, 1, head_dim, generator=random), v, do]


def _evaluate(run: Attention, tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """Forward, or forward and backward to q, k and v."""
    *inputs, do = tensors
    if not backward:
        with torch.no_grad():
            return (run(*inputs),)
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = run(*leaves)
    return (o.detach(), *torch.autograd.grad(o, leaves, do))


def _dense_fits(length: int, kv_heads: int) -> bool:
    return kv_heads * length**2 * 4 <= DENSE_BYTES


def cost_figure(record: Record, title: str, note: str = "") -> Figure:
    """Milliseconds against length, on logarithmic axes."""
    curves = []
    for name, (shown, role) in NAMES.items():
        points = [(x, y) for x, y in zip(record["lengths"], record["milliseconds"][name], strict=True) if y is not None]
        if points:
            curves.append(series(shown, role, *zip(*points, strict=True), dashed=name == DENSE))
    return lines(title, "tokens", "milliseconds", curves, log="xy", note=note)
