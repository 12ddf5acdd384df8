"""The case `memory`: peak memory of one call, and its growth with the length.

Each call has its own process: a peak never falls, so an earlier call would hide the peak of the next one.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from . import harness, path, solve
from .harness import Shape, Spread
from .records import Case, Point, Result, Settings
from .solve import DENSE, LUCID, PASSES, SDPA

WARM_UP_LENGTH, REPEATS = 300, 3
# Limits on the memory over that of SDPA, by heads, and on memory(N) / memory(N/2). Quadratic memory gives 4.
LIMITS, GROWTH_LIMIT = {Shape(64, 8, 8): 2.2, Shape(64, 32, 4): 1.1}, 2.3
GROWTH_SHAPE, GROWTH_LENGTHS, DENSE_LENGTH = Shape(64, 2, 2), (1024, 2048, 4096, 8192, 16384), 8192
PATH_SHAPE, PATH_LENGTHS = Shape(64, 4, 4), (2048, 4096, 8192)
# A length at which N × N matrices would not fit.
LONG, QUICK_LENGTH = 65536, 1024
MALLOC = "MALLOC_MMAP_THRESHOLD_"


@dataclass(frozen=True)
class Job:
    """One call. name: of `solve.CONTESTANTS` or `path.ATTENTIONS`."""

    name: str
    shape: Shape
    N: int
    backward: bool = True
    threads: int = 1


def measure_cost(job: Job) -> tuple[float, float]:
    """Peak memory of a call in a process of its own, in MB without its inputs; and its seconds. Needs Linux's /proc."""
    before = os.environ.get(MALLOC)
    # With this threshold glibc maps each tensor by itself. Otherwise it keeps freed memory, which would count.
    os.environ[MALLOC] = "65536"
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_measure, job).result()
    finally:
        del os.environ[MALLOC]
        os.environ |= {} if before is None else {MALLOC: before}


def _call(job: Job) -> Callable[[], object]:
    if job.name in path.ATTENTIONS:
        return partial(path.evaluate, job.name, path.inputs(job.shape, job.N), job.backward)
    return partial(harness.evaluate, solve.CONTESTANTS[job.name], harness.inputs(*job.shape, job.N), job.backward)


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def _measure(job: Job) -> tuple[float, float]:
    torch.set_num_threads(job.threads)
    # Memory that libraries take on first use is not counted.
    _call(replace(job, N=WARM_UP_LENGTH))()
    call = _call(job)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _status("VmRSS"), time.perf_counter()
    result = call()
    seconds, peak = time.perf_counter() - start, _status("VmHWM")
    del result
    return peak - before, seconds


@cache
def _cost(job: Job, repeats: int) -> tuple[float, Spread]:
    """Median megabytes, and seconds, of `repeats` processes."""
    costs = [measure_cost(job) for _ in range(repeats)]
    return statistics.median(size for size, _ in costs), Spread.of([seconds for _, seconds in costs])


def measure(
    shape: Shape, N: int, names: tuple[str, ...], *, settings: Settings, backward: bool = True, grows: bool = False
) -> Result:
    """Memory of the contestants `names`, over that of SDPA; with `grows`, also over that at half the length."""
    if path.PATH in names:
        path.check_truth(shape, path.GATE_LENGTH, backward)
    else:
        solve.check_truth(shape, solve.GATE_LENGTH, backward, torch.float32, names)
    repeats = 1 if settings.quick else REPEATS
    jobs = {name: Job(name, shape, N, backward, settings.threads[0]) for name in names}
    costs = {name: _cost(job, repeats) for name, job in jobs.items()}
    megabytes = {name: size for name, (size, _) in costs.items()}
    measured, limits = {}, {f"{LUCID} / {SDPA}": LIMITS[shape]} if shape in LIMITS else {}
    for name, size in megabytes.items():
        if SDPA in names and name != SDPA:
            measured[f"{name} / {SDPA}"] = Spread.of([size / megabytes[SDPA]])
        if grows and name not in (SDPA, DENSE):
            growth = f"{name}, N over N/2"
            measured[growth] = Spread.of([size / _cost(replace(jobs[name], N=N // 2), repeats)[0]])
            limits[growth] = GROWTH_LIMIT
    return Result({name: seconds for name, (_, seconds) in costs.items()}, measured, {}, limits, megabytes)


def _points(settings: Settings) -> list[Point]:
    quick = (QUICK_LENGTH,) if settings.quick else ()
    calls: list[tuple[Shape, int, tuple[str, ...], bool, bool]] = []
    for shape in LIMITS:
        calls += [(shape, N, (SDPA, LUCID), True, False) for N in quick or (4096,)]
    for N in quick or GROWTH_LENGTHS:
        names = (SDPA, LUCID, DENSE) if N <= DENSE_LENGTH else (SDPA, LUCID)
        calls.append((GROWTH_SHAPE, N, names, True, GROWTH_LENGTHS[0] < N))
    for N in quick or PATH_LENGTHS:
        calls.append((PATH_SHAPE, N, (SDPA, *path.ATTENTIONS), True, PATH_LENGTHS[0] < N))
    for N in quick or (LONG,):
        calls.append((GROWTH_SHAPE, N, (LUCID,), False, True))
    threads = settings.threads[0]
    return [
        Point(
            {"threads": threads, "heads": shape.label, "pass": PASSES[backward], "N": N},
            partial(measure, shape, N, names, backward=backward, grows=grows, settings=settings),
        )
        for shape, N, names, backward, grows in calls
    ]


CASE = Case(
    "memory",
    "Peak memory of one float32 call, D = 64, without that of its inputs, in a fresh process after a small call "
    f"(median of {REPEATS} processes), up to a length at which N × N matrices would not fit. Limits: 2.2 × SDPA for "
    f"8/8 heads, 1.1 × for 32/4; {GROWTH_LIMIT} × the memory at half the length. Memory over its limit is an error.",
    _points,
)
