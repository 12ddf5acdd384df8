"""Timing by comparison: contestants take turns in one run, so a slow spell of the machine slows all of them.

A contestant is timed only after its results agree with the definition in float64. All keys are correlated: on
independent random keys P is nearly the identity, and a contestant that skips the solve would pass.
"""

import contextlib
import gc
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Before a shorter call, run the same contestant untimed: short times depend on the processor's caches.
SHORT_SECONDS = 0.05
# The first round counts if all calls are longer than this. Otherwise it warms up.
LONG_SECONDS = 0.5
# The fewest rounds, even beyond the budget, by the seconds of a round: long ones average over slow spells.
ROUNDS = {4.0: 5, 20.0: 3, float("inf"): 2}
BRIEF_ROUNDS, MOST_ROUNDS = 3, 500
# Environment variables that change times: the instructions that may be used, and the size above which glibc returns
# memory to the system at once (at most 32 MiB by default), so that the next tensor of that size gets fresh pages.
SETTINGS = (
    *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME"),
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
)

Run = Callable[[], object]
Clock = Callable[[Run], float]


class Spread(NamedTuple):
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = (float(f"{x:.5g}") for x in statistics.quantiles(values, n=4, method="inclusive"))
        return cls(median, low, high, len(values))


def race(
    runs: Mapping[str, Run],
    *,
    budget: float,
    seed: str,
    brief: Collection[str] = (),
    least: int | None = None,
    most: int = MOST_ROUNDS,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; every round runs all of them in a new order.

    budget: seconds after which no round starts. least: the fewest rounds, even beyond the budget; default by duration.
    brief: slow contestants, which take part in the first three rounds only.
    clock: from a run to its seconds; default the wall clock. See `device_clock`.
    """
    clock = clock or _seconds
    order, shuffle = list(runs), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in runs}
    with _no_garbage_collection():
        for _ in range(2):
            shuffle(order)
            first = {name: clock(runs[name]) for name in order}
            if min(first.values()) > SHORT_SECONDS:
                break
        short = min(first.values()) < SHORT_SECONDS
        if min(first.values()) > LONG_SECONDS:
            times = {name: [seconds] for name, seconds in first.items()}
        one_round = sum(seconds for name, seconds in first.items() if name not in brief)
        least = least or next(rounds for longest, rounds in ROUNDS.items() if one_round <= longest)
        start, done = time.perf_counter(), len(times[order[0]])
        while done < least or (done < most and time.perf_counter() - start < budget):
            shuffle(order)
            for name in order:
                if name in brief and done >= BRIEF_ROUNDS:
                    continue
                if short:
                    runs[name]()
                times[name].append(clock(runs[name]))
            done += 1
    return times


def ratios(times: list[float], peer: list[float]) -> Spread:
    """The ratio to the peer, round by round: a slow spell of the machine is in both times and cancels."""
    return Spread.of([a / b for a, b in zip(times, peer, strict=False)])


def device_clock(device: torch.device) -> Clock:
    """The wall clock; around synchronised runs for a device that works asynchronously."""
    if device.type == "cpu":
        return _seconds

    def clock(run: Run) -> float:
        torch.accelerator.synchronize(device)

        def whole() -> None:
            run()
            torch.accelerator.synchronize(device)

        return _seconds(whole)

    return clock


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    del result  # freed outside of the measured time, for every contestant
    return seconds


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Pin torch to `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> dict[str, str]:
    """What times depend on: hardware, versions, environment variables."""
    import psutil

    description = {
        "CPU": cpu_model(),
        "cores": f"{psutil.cpu_count(logical=False)} physical, {os.cpu_count()} logical",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "lucid_attention": version("lucid-attention"),
        "Numba": version("numba") if find_spec("numba") else "not installed",
    }
    if torch.cuda.is_available():
        description["GPU"] = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return description | {name: os.environ[name] for name in SETTINGS if name in os.environ}


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines())
        about = {name.strip(): value.strip() for name, _, value in lines}
        if name := about.get("model name"):
            # A virtual machine may hide which one it is.
            number = f" family {about.get('cpu family')} model {about.get('model')}"
            return name if any(letter.isdigit() for letter in name) else name + number
    return platform.processor() or platform.machine()


# Limits on ‖x − truth‖ / ‖truth‖. Correct contestants stay five times below; without the solve the error is near 1.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
TRUTH = "the float64 truth"
ATTENTION_PARTS = ("its output", "the gradient of q", "the gradient of k", "the gradient of v")
DECODER_PARTS = ("its output", "its stored value")


class WrongAnswer(ValueError):
    """The result of a contestant differs from the definition."""


class Shape(NamedTuple):
    """Heads of attention: D features, `heads` query heads over `kv_heads` key/value heads."""

    D: int
    heads: int
    kv_heads: int

    @property
    def flop_ratio(self) -> float:
        """LUCID over softmax attention by the count of operations: a solve is one more attention per key/value head."""
        return 1 + self.kv_heads / self.heads

    @property
    def label(self) -> str:
        return f"{self.heads}/{self.kv_heads}"


def inputs(D: int, heads: int, kv_heads: int, N: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output. The keys of a head share a mean: their cosines are about 0.86."""
    random = torch.Generator().manual_seed(N)
    q, do = (torch.randn(1, heads, N, D, generator=random) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, N, D, generator=random) for _ in range(2))
    k += 2.5 * torch.randn(1, kv_heads, 1, D, generator=random)
    return [x.to(dtype) for x in (q, k, v, do)]


def true_values(k: Tensor, v: Tensor) -> Tensor:
    """Y = P⁻¹ V by its definition, in float64."""
    unit = k.double() / k.double().norm(dim=-1, keepdim=True)
    root = math.sqrt(k.shape[-1])
    P = torch.exp(root * (unit @ unit.mT - 1)).tril(-1) + torch.eye(k.shape[2], dtype=torch.float64)
    return torch.linalg.solve_triangular(P, v.double(), upper=False)


def true_attention(q: Tensor, k: Tensor, v: Tensor, solves: bool) -> Tensor:
    """softmax(q kᵀ/√D + causal) applied to v, or to P⁻¹ v, by its definition, in float64."""
    y = true_values(k, v) if solves else v.double()
    G, N = q.shape[1] // k.shape[1], k.shape[2]
    scores = q.double() @ k.double().repeat_interleave(G, 1).mT / math.sqrt(k.shape[-1])
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ y.repeat_interleave(G, 1)


def evaluate(run: Callable[..., Tensor], tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output of `run` and, if `backward`, the gradients of its inputs. The last tensor is the output's gradient."""
    *arguments, do = tensors
    if not backward:
        with torch.no_grad():
            return (run(*arguments),)
    arguments = [x.detach().requires_grad_() for x in arguments]
    o = run(*arguments)
    return (o.detach(), *torch.autograd.grad(o, arguments, do.to(o.dtype)))


def distance(x: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return float((x.double() - truth).norm() / truth.norm())


def check(
    where: str,
    name: str,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    parts: Sequence[str] = ATTENTION_PARTS,
    against: str = TRUTH,
) -> None:
    """Compare the tensors of contestant `name` with the expected ones, which come from `against`."""
    tolerance = TOLERANCE[got[0].dtype]
    for x, truth, part in zip(got, expected, parts, strict=False):
        error = distance(x, truth)
        if not error <= tolerance:  # NaN is wrong too
            raise WrongAnswer(
                f"{where}: {name!r} does not compute what it should: {part} is {error:.2g} away from {against} "
                f"(relative; allowed {tolerance:g}). Nothing was timed"
            )


def check_sharp(where: str, lucid: Tensor, softmax: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Refuse inputs on which a contestant that computes softmax attention would pass as LUCID."""
    error = distance(lucid, softmax)
    if error < 5 * TOLERANCE[dtype]:
        raise WrongAnswer(f"{where}: the keys are too little correlated to tell LUCID from softmax ({error:.2g} apart)")
