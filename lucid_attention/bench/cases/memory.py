"""Peak memory, and lengths that only linear memory reaches."""

import statistics
from functools import partial

import torch

from ..harness import Spread
from ..report import entry_ratio, fact, megabytes, seconds, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from .memory_worker import PRECONDITION, START_UP, Cost, Job, cost
from .peers import OURS, SDPA
from .solve import Shape, check_truth

LIMITS = {Shape(64, 8, 8): 2.2, Shape(64, 32, 4): 1.1}
REPEATS = 3
# Of the memory that the matrices P would take.
QUADRATIC_LIMIT = 0.01


def entry(costs: list[Cost]) -> Entry:
    return Entry(
        seconds=Spread.of([one.seconds for one in costs]),
        megabytes=statistics.median(one.megabytes for one in costs),
    )


def _facts(shape: Shape, what: str, N: int) -> dict[str, int | str]:
    return {**shape._asdict(), "pass": what, "N": N}


def _compare(shape: Shape, N: int, threads: int, repeats: int) -> Record:
    check_truth("memory", shape, True, torch.float32, (SDPA, OURS))
    entries = {
        name: entry([cost(Job(name, *shape, N, True, threads)) for _ in range(repeats)]) for name in (SDPA, OURS)
    }
    ours, peer = entries[OURS].megabytes, entries[SDPA].megabytes
    assert ours is not None
    assert peer is not None
    checks = {"ratio": Check(ours / peer, LIMITS[shape])}
    return Record("memory", threads, _facts(shape, "forward+backward", N), entries, checks)


def _reach(shape: Shape, name: str, N: int, threads: int, strict: bool) -> Record:
    """One pass at a length where a quadratic matrix would not fit."""
    check_truth("memory", shape, False, torch.float32, (OURS,))
    found = cost(Job(name, *shape, N, False, threads))
    quadratic = 4 * shape.kv_heads * N**2 / 1e6
    checks = {"share of quadratic": Check(found.megabytes / quadratic, QUADRATIC_LIMIT)} if strict else {}
    what = "precondition" if name == PRECONDITION else "forward"
    return Record("memory", threads, _facts(shape, what, N), {OURS: entry([found])}, checks, strict=strict)


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


BENCHMARK = Benchmark(
    name="memory",
    about=(
        "Peak memory of one float32 call over what its inputs take, each measured in a fresh process after a small "
        f"call that lets libraries set up (median of {REPEATS} processes). Then two lengths that only linear memory "
        "reaches, with the share of the memory that the N × N matrices would take, and the time of that one call."
    ),
    limits=(
        "Asked for: at most 2.2 × SDPA for 8/8 heads and 1.1 × for 32/4; at the long lengths at most "
        f"{100 * QUADRATIC_LIMIT:g} % of the matrices."
    ),
    minutes="about 2 minutes",
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
