"""Peak memory: `memory` for LUCID, and the lengths that only linear memory reaches; `path_memory` for PaTH.

`python -m lucid_lab.bench.cases.memory JOB` measures one call and prints JSON. Each call has its own process: a
peak never falls, so an earlier call would hide the peak of the next one.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch

from lucid_attention.ops.lucid.api import precondition

from .. import gate
from ..gate import Shape
from ..harness import Spread
from ..report import Cell, entry_ratio, fact, megabytes, seconds, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from . import path, peers
from .path import LUCID_PATH, PATH
from .peers import OURS, SDPA
from .solve import check_truth

MODULE = "lucid_lab.bench.cases.memory"
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PRECONDITION = "precondition"
WARM_UP_LENGTH = 300
# Seconds until a fresh process has imported torch, for estimates of duration.
START_UP = 2.0
LIMITS = {Shape(64, 8, 8): 2.2, Shape(64, 32, 4): 1.1}
REPEATS = 3
# Limit on peak memory / memory of the matrices P.
QUADRATIC_LIMIT = 0.01
PATH_SHAPE = Shape(64, 4, 4)
PATH_NAMES = (SDPA, PATH, LUCID_PATH)
# Limit on memory(N) / memory(N/2). Quadratic memory gives 4.
PATH_LIMIT = 2.3


@dataclass(frozen=True)
class Job:
    """name: of `peers.ATTENTIONS` or `path.ATTENTIONS`, or `PRECONDITION` for the solve alone."""

    name: str
    D: int
    heads: int
    kv_heads: int
    N: int
    backward: bool
    threads: int


@dataclass(frozen=True)
class Cost:
    """Peak memory of a call, inputs excluded, and its time."""

    megabytes: float
    seconds: float


def measure_cost(job: Job) -> Cost:
    """Run `job` in a process of its own."""
    # With this threshold glibc maps each tensor by itself. Otherwise it keeps freed memory, which would count.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", MODULE, json.dumps(asdict(job))]
    # `-m` looks in the current folder first: the process measures the same package as this one.
    process = subprocess.run(command, cwd=Path(__file__).parents[3], env=env, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(
            f"the memory of {job} could not be measured (exit code {process.returncode}):\n{process.stderr}"
        )
    return Cost(**json.loads(process.stdout))


def _call(job: Job, N: int) -> Callable[[], object]:
    if job.name in path.ATTENTIONS:
        path_tensors = path.inputs(Shape(job.D, job.heads, job.kv_heads), N)
        return lambda: path.evaluate(job.name, path_tensors, job.backward)
    tensors = gate.inputs(job.D, job.heads, job.kv_heads, N)
    if job.name == PRECONDITION:
        k, v = tensors[1:3]
        return lambda: precondition(k, v)
    return lambda: gate.evaluate(peers.ATTENTIONS[job.name].run, tensors, job.backward)


def _status(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no line {name}")


def _peak_without_proc() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _measure(job: Job) -> Cost:
    torch.set_num_threads(job.threads)
    # Memory that libraries take on first use is not counted.
    _call(job, WARM_UP_LENGTH)()
    call = _call(job, job.N)
    if RESET.exists():
        RESET.write_text("5")  # resets the peak
        before = _status("VmRSS")
    else:
        before = _peak_without_proc()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    peak = _status("VmHWM") if RESET.exists() else _peak_without_proc()
    del result
    return Cost((peak - before) / 1e6, seconds)


def entry(costs: list[Cost]) -> Entry:
    return Entry(
        seconds=Spread.of([cost.seconds for cost in costs]),
        megabytes=statistics.median(cost.megabytes for cost in costs),
    )


def _facts(shape: Shape, what: str, N: int) -> dict[str, int | str]:
    return {**shape._asdict(), "pass": what, "N": N}


def _compare(shape: Shape, N: int, threads: int, repeats: int) -> Record:
    check_truth("memory", shape, True, torch.float32, (SDPA, OURS))
    jobs = {name: Job(name, *shape, N, True, threads) for name in (SDPA, OURS)}
    entries = {name: entry([measure_cost(job) for _ in range(repeats)]) for name, job in jobs.items()}
    ours, peer = entries[OURS].megabytes, entries[SDPA].megabytes
    assert ours is not None
    assert peer is not None
    checks = {"ratio": Check(ours / peer, LIMITS[shape])}
    return Record("memory", threads, _facts(shape, "forward+backward", N), entries, checks)


def _reach(shape: Shape, name: str, N: int, threads: int, strict: bool) -> Record:
    """One pass at a length where a quadratic matrix would not fit."""
    check_truth("memory", shape, False, torch.float32, (OURS,))
    cost = measure_cost(Job(name, *shape, N, False, threads))
    quadratic = 4 * shape.kv_heads * N**2 / 1e6
    checks = {"share of quadratic": Check(cost.megabytes / quadratic, QUADRATIC_LIMIT)} if strict else {}
    what = "precondition" if name == PRECONDITION else "forward"
    return Record("memory", threads, _facts(shape, what, N), {OURS: entry([cost])}, checks, strict=strict)


def _cases(settings: Settings) -> list[Case]:
    threads = settings.threads[0]
    N, repeats = (1024, 1) if settings.quick else (4096, REPEATS)
    cases = [
        Case(
            key=f"memory {threads} {shape} {N}",
            label=f"D={shape.D} {shape.heads}/{shape.kv_heads} forward+backward N={N}",
            threads=threads,
            run=partial(_compare, shape, N, threads, repeats),
            work=repeats * 7.0 * N**2 * shape.D * (2 * shape.heads + shape.kv_heads),
            fixed=2 * repeats * START_UP,
        )
        for shape in LIMITS
    ]
    long, longest = (4096, 8192) if settings.quick else (65536, 131072)
    for shape, name, N in ((Shape(64, 2, 2), OURS, long), (Shape(64, 1, 1), PRECONDITION, longest)):
        solves_only = name == PRECONDITION
        cases.append(
            Case(
                key=f"memory {threads} {name} {N}",
                label=f"D={shape.D} {shape.heads}/{shape.kv_heads} {name if solves_only else 'forward'} N={N}",
                threads=threads,
                run=partial(_reach, shape, name, N, threads, not settings.quick),
                work=2.0 * N**2 * shape.D * (shape.kv_heads if solves_only else 2 * shape.heads),
                fixed=START_UP,
            )
        )
    return cases


def _quadratic(record: Record) -> str:
    if "share of quadratic" not in record.checks:
        return ""
    return f"{100 * record.checks['share of quadratic'].value:.2f} %"


def _limit(record: Record) -> str:
    if "ratio" in record.checks:
        return f"{record.checks['ratio'].limit:.2f}"
    return f"{100 * QUADRATIC_LIMIT:g} %" if record.checks else ""


MEMORY = Benchmark(
    name="memory",
    about=(
        "Peak memory of one float32 call, without that of its inputs, in a fresh process after a small call in which "
        f"libraries set up (median of {REPEATS} processes). Then two lengths that only linear memory reaches, with the "
        "share of the memory that the N × N matrices would take, and the time of that one call."
    ),
    limits=(
        "Limits: 2.2 × SDPA for 8/8 heads and 1.1 × for 32/4; at the long lengths "
        f"{100 * QUADRATIC_LIMIT:g} % of the matrices."
    ),
    cases=_cases,
    columns=(
        Column("D", fact("D")),
        Column("heads", lambda record: f"{record.facts['heads']}/{record.facts['kv_heads']}"),
        Column("pass", fact("pass")),
        Column("N", fact("N")),
        Column("SDPA, MB", megabytes(SDPA)),
        Column("ours, MB", megabytes(OURS)),
        Column("ours / SDPA", entry_ratio(OURS, SDPA)),
        Column("of N × N", _quadratic),
        Column("ours, s", seconds(OURS)),
        Column("limit", _limit),
        Column("", verdict),
    ),
)


@cache
def _path_entry(name: str, N: int, threads: int, repeats: int) -> Entry:
    return entry([measure_cost(Job(name, *PATH_SHAPE, N, True, threads)) for _ in range(repeats)])


def _path_megabytes(name: str, N: int, threads: int, repeats: int) -> float:
    value = _path_entry(name, N, threads, repeats).megabytes
    assert value is not None
    return value


def _path_measure(N: int, grows: bool, threads: int, repeats: int, strict: bool) -> Record:
    path.check_truth("path_memory", PATH_SHAPE, True)
    entries = {name: _path_entry(name, N, threads, repeats) for name in PATH_NAMES}
    checks = {}
    for name in (PATH, LUCID_PATH) if grows else ():
        growth = _path_megabytes(name, N, threads, repeats) / _path_megabytes(name, N // 2, threads, repeats)
        checks[f"{name}, N over N/2"] = Check(growth, PATH_LIMIT)
    facts: dict[str, int | str] = {**PATH_SHAPE._asdict(), "N": N}
    return Record("path_memory", threads, facts, entries, checks, strict=strict)


def _path_cases(settings: Settings) -> list[Case]:
    threads = settings.threads[0]
    lengths, repeats = ((1024,), 1) if settings.quick else ((2048, 4096, 8192), REPEATS)
    return [
        Case(
            key=f"path_memory {threads} {N}",
            label=f"D={PATH_SHAPE.D} {PATH_SHAPE.heads}/{PATH_SHAPE.kv_heads} forward+backward N={N}",
            threads=threads,
            run=partial(_path_measure, N, settings.quick or lengths[0] < N, threads, repeats, not settings.quick),
            work=repeats * 7.0 * N**2 * PATH_SHAPE.D * PATH_SHAPE.heads * 5,
            fixed=(5 if settings.quick else 3) * repeats * START_UP,
        )
        for N in lengths
    ]


def _growth(name: str) -> Cell:
    def cell(record: Record) -> str:
        check = record.checks.get(f"{name}, N over N/2")
        return "" if check is None else f"{check.value:.2f}"

    return cell


PATH_MEMORY = Benchmark(
    name="path_memory",
    about=(
        "Peak memory of forward+backward of PaTH and LUCID-PaTH in float32, without that of the inputs "
        f"(D = {PATH_SHAPE.D}, {PATH_SHAPE.heads}/{PATH_SHAPE.kv_heads} heads; gradients of q, k, v, w and β, of q, k "
        "and v for SDPA), each in a fresh process after a small call in which libraries set up "
        f"(median of {REPEATS} processes)."
    ),
    limits=f"Limit: {PATH_LIMIT} × the memory at half the length, which only linear memory keeps.",
    cases=_path_cases,
    columns=(
        Column("N", fact("N")),
        Column("SDPA, MB", megabytes(SDPA)),
        Column("PaTH, MB", megabytes(PATH)),
        Column("LUCID-PaTH, MB", megabytes(LUCID_PATH)),
        Column("PaTH / SDPA", entry_ratio(PATH, SDPA)),
        Column("LUCID-PaTH / SDPA", entry_ratio(LUCID_PATH, SDPA)),
        Column("PaTH, N over N/2", _growth(PATH)),
        Column("LUCID-PaTH, N over N/2", _growth(LUCID_PATH)),
        Column("", verdict),
    ),
    page="family",
)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Job(**json.loads(sys.argv[1]))))))
