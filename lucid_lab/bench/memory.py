"""The case `memory`: peak memory and its growth with the length.

`python -m lucid_lab.bench.memory JOB` measures one call and prints JSON. Each call has its own process: a peak never
falls, so an earlier call would hide the peak of the next one.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from . import gate, path, solve
from .gate import Shape
from .harness import Spread
from .records import Case, Point, Result, Settings
from .solve import DENSE, LUCID, PASSES, SDPA

WARM_UP_LENGTH, REPEATS = 300, 3
# Limits on the memory over that of SDPA, by heads.
LIMITS = {Shape(64, 8, 8): 2.2, Shape(64, 32, 4): 1.1}
# Limits on the share of the memory of the matrices P, and on memory(N) / memory(N/2). Quadratic memory gives 4.
SHARE_LIMIT, GROWTH_LIMIT = 0.01, 2.3
GROWTH_SHAPE, GROWTH_LENGTHS, DENSE_LENGTH = Shape(64, 2, 2), (1024, 2048, 4096, 8192, 16384), 8192
LONG = 65536
PATH_SHAPE, PATH_LENGTHS = Shape(64, 4, 4), (2048, 4096, 8192)
SHARE, GROWTH = "share of N × N", "{}, N over N/2".format


@dataclass(frozen=True)
class Job:
    """One call. name: of `solve.CONTESTANTS` or `path.ATTENTIONS`."""

    name: str
    D: int
    heads: int
    kv_heads: int
    N: int
    backward: bool = True
    threads: int = 1


@dataclass(frozen=True)
class Cost:
    """Peak memory of a call, inputs excluded, and its time."""

    megabytes: float
    seconds: float


def measure_cost(job: Job) -> Cost:
    """Run `job` in a process of its own. Needs /proc of Linux."""
    # With this threshold glibc maps each tensor by itself. Otherwise it keeps freed memory, which would count.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "lucid_lab.bench.memory", json.dumps(asdict(job))]
    # `-m` looks in the current folder first: the process measures the same package as this one.
    process = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(
            f"the memory of {job} could not be measured (exit code {process.returncode}): {process.stderr}"
        )
    return Cost(**json.loads(process.stdout))


def _call(job: Job) -> Callable[[], object]:
    if job.name in path.ATTENTIONS:
        path_tensors = path.inputs(Shape(job.D, job.heads, job.kv_heads), job.N)
        return lambda: path.evaluate(job.name, path_tensors, job.backward)
    tensors = gate.inputs(job.D, job.heads, job.kv_heads, job.N)
    return lambda: gate.evaluate(solve.CONTESTANTS[job.name].run, tensors, job.backward)


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def _measure(job: Job) -> Cost:
    torch.set_num_threads(job.threads)
    # Memory that libraries take on first use is not counted.
    _call(replace(job, N=WARM_UP_LENGTH))()
    call = _call(job)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _status("VmRSS"), time.perf_counter()
    result = call()
    seconds, peak = time.perf_counter() - start, _status("VmHWM")
    del result
    return Cost(peak - before, seconds)


@cache
def _cost(job: Job, repeats: int) -> tuple[float, Spread]:
    """Median megabytes, and seconds, of `repeats` processes."""
    costs = [measure_cost(job) for _ in range(repeats)]
    return statistics.median(cost.megabytes for cost in costs), Spread.of([cost.seconds for cost in costs])


def _one(value: float) -> Spread:
    return Spread(value, value, value, 1)


def compare(shape: Shape, N: int, names: tuple[str, ...], *, grows: bool, settings: Settings) -> Result:
    """Forward+backward of several contestants; with `grows`, also at half the length."""
    if path.PATH in names:
        path.check_truth(shape, path.GATE_LENGTH, True)
    else:
        solve.check_truth(shape, solve.GATE_LENGTH, True, torch.float32, names)
    repeats = 1 if settings.quick else REPEATS
    jobs = {name: Job(name, *shape, N, threads=settings.threads[0]) for name in names}
    costs = {name: _cost(job, repeats) for name, job in jobs.items()}
    megabytes = {name: cost[0] for name, cost in costs.items()}
    others = [name for name in names if name != SDPA]
    measured = {f"{name} / {SDPA}": _one(megabytes[name] / megabytes[SDPA]) for name in others}
    limits = {f"{LUCID} / {SDPA}": LIMITS[shape]} if shape in LIMITS else {}
    for name in others if grows else ():
        if name != DENSE:
            measured[GROWTH(name)] = _one(megabytes[name] / _cost(replace(jobs[name], N=N // 2), repeats)[0])
            limits[GROWTH(name)] = GROWTH_LIMIT
    return Result({name: cost[1] for name, cost in costs.items()}, measured, {}, limits, megabytes)


def reach(shape: Shape, N: int, settings: Settings) -> Result:
    """One forward pass at a length at which N × N matrices would not fit."""
    solve.check_truth(shape, solve.GATE_LENGTH, False, torch.float32, (LUCID,))
    megabytes, seconds = _cost(Job(LUCID, *shape, N, False, settings.threads[0]), 1)
    share = megabytes / (4e-6 * shape.kv_heads * N**2)
    return Result({LUCID: seconds}, {SHARE: _one(share)}, {}, {SHARE: SHARE_LIMIT}, {LUCID: megabytes})


def _points(settings: Settings) -> list[Point]:
    quick = settings.quick
    jobs: list[tuple[Shape, int, tuple[str, ...], bool]] = []
    jobs += [(shape, 1024 if quick else 4096, (SDPA, LUCID), False) for shape in LIMITS]
    for N in (1024,) if quick else GROWTH_LENGTHS:
        names = (SDPA, LUCID, DENSE) if N <= DENSE_LENGTH else (SDPA, LUCID)
        jobs.append((GROWTH_SHAPE, N, names, GROWTH_LENGTHS[0] < N))
    for N in (1024,) if quick else PATH_LENGTHS:
        jobs.append((PATH_SHAPE, N, (SDPA, *path.ATTENTIONS), not quick and PATH_LENGTHS[0] < N))
    threads = settings.threads[0]
    points = [
        Point(
            {"threads": threads, "heads": shape.label, "pass": PASSES[True], "N": N},
            partial(compare, shape, N, names, grows=grows, settings=settings),
        )
        for shape, N, names, grows in jobs
    ]
    N = 4096 if quick else LONG
    sizes = {"threads": threads, "heads": GROWTH_SHAPE.label, "pass": PASSES[False], "N": N}
    return [*points, Point(sizes, partial(reach, GROWTH_SHAPE, N, settings))]


CASE = Case(
    "memory",
    "Peak memory of one float32 call, D = 64, without that of its inputs, in a fresh process after a small call "
    f"(median of {REPEATS} processes), and a length that only linear memory reaches. Limits: 2.2 × SDPA for 8/8 heads, "
    f"1.1 × for 32/4; {GROWTH_LIMIT} × the memory at half the length; {SHARE_LIMIT:.0%} of the N × N matrices. Memory "
    "over its limit is an error.",
    _points,
)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Job(**json.loads(sys.argv[1]))))))
