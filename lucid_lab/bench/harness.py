"""Timing by comparison: contestants take turns in one run, so a slow spell of the machine slows all of them."""

import contextlib
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

# Before a shorter call, run the same contestant untimed: short times depend on the processor's caches.
SHORT_SECONDS = 0.05
# The first round counts if all calls are longer than this. Otherwise it is a rehearsal for the cold start.
LONG_SECONDS = 0.5
# The fewest rounds, even beyond the budget: 5; 3 if a round takes more than 4 seconds; 2 if it takes more than 20.
ROUNDS, LONG_ROUNDS, LONG_ROUND_SECONDS = 5, 3, 4.0
LONGEST_ROUNDS, LONGEST_ROUND_SECONDS = 2, 20.0
MOST_ROUNDS = 500
# Environment variables that change times: the instructions that may be used, and the size above which glibc returns
# memory to the system at once (at most 32 MiB by default), so that the next tensor of that size gets fresh pages.
SETTINGS = (
    *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "NUMBA_CPU_NAME"),
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"),
)

Run = Callable[[], object]
Clock = Callable[[Run], float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles over rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


def least_rounds(round_seconds: float) -> int:
    """The fewest rounds to run. Long rounds need fewer, because each one averages over slow spells."""
    if round_seconds > LONGEST_ROUND_SECONDS:
        return LONGEST_ROUNDS
    return ROUNDS if round_seconds < LONG_ROUND_SECONDS else LONG_ROUNDS


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

    budget: seconds after which no round starts. least: the fewest rounds, even beyond it; default `least_rounds`.
    brief: slow contestants, which take part in the first three rounds only.
    clock: from a run to its seconds; default the wall clock. See `device_clock`.
    """
    clock = clock or _seconds
    order, shuffle = list(runs), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in runs}
    with _no_garbage_collection():
        for _ in range(2):
            shuffle(order)
            rehearsal = {name: clock(runs[name]) for name in order}
            if min(rehearsal.values()) > SHORT_SECONDS:
                break
        short = min(rehearsal.values()) < SHORT_SECONDS
        if min(rehearsal.values()) > LONG_SECONDS:
            times = {name: [seconds] for name, seconds in rehearsal.items()}
        least = least or least_rounds(sum(seconds for name, seconds in rehearsal.items() if name not in brief))
        start, done = time.perf_counter(), len(times[order[0]])
        while done < least or (done < most and time.perf_counter() - start < budget):
            shuffle(order)
            for name in order:
                if name in brief and done >= LONG_ROUNDS:
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
    """A clock for work that a device does on its own: events on CUDA, elsewhere the wall clock around all of it."""
    if device.type == "cpu":
        return _seconds
    if device.type == "cuda":
        return partial(_event_seconds, device)
    return partial(_synchronised_seconds, getattr(torch, device.type).synchronize)


def _event_seconds(device: torch.device, run: Run) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize()
    del result
    return start.elapsed_time(end) / 1000


def _synchronised_seconds(synchronize: Callable[[], object], run: Run) -> float:
    def whole() -> object:
        result = run()
        synchronize()
        return result

    synchronize()
    return _seconds(whole)


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


def attention_speed() -> float:
    """Floating point operations per second of torch's attention on one thread, for estimates of duration."""
    H, N, D = 4, 1024, 64
    q = torch.randn(1, H, N, D)
    with threads(1):
        times = [_seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)) for _ in range(7)]
    return 2 * H * N * N * D / statistics.median(times)


def machine() -> dict[str, str]:
    """What the numbers depend on."""
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


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
