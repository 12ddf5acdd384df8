"""Timing by comparison: contestants take turns in one run, so a slow spell of the machine slows all of them."""

import contextlib
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

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
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
