"""Peak memory of PaTH and LUCID-PaTH: it has to grow like the length."""

from functools import cache, partial

from ..report import Cell, entry_ratio, fact, megabytes, verdict
from ..results import Benchmark, Case, Check, Column, Entry, Record, Settings
from .memory import REPEATS, entry
from .memory_worker import START_UP, Job, cost
from .path_peers import LUCID_PATH, PATH, check_truth
from .peers import SDPA
from .solve import Shape

SHAPE = Shape(64, 4, 4)
NAMES = (SDPA, PATH, LUCID_PATH)
# Of the memory at half the length. Quadratic memory would be 4.
LIMIT = 2.3


@cache
def _entry(name: str, N: int, threads: int, repeats: int) -> Entry:
    return entry([cost(Job(name, *SHAPE, N, True, threads)) for _ in range(repeats)])


def _megabytes(name: str, N: int, threads: int, repeats: int) -> float:
    value = _entry(name, N, threads, repeats).megabytes
    assert value is not None
    return value


def _measure(N: int, grows: bool, threads: int, repeats: int, strict: bool) -> Record:
    check_truth("path_memory", SHAPE, True)
    entries = {name: _entry(name, N, threads, repeats) for name in NAMES}
    checks = {}
    for name in (PATH, LUCID_PATH) if grows else ():
        growth = _megabytes(name, N, threads, repeats) / _megabytes(name, N // 2, threads, repeats)
        checks[f"{name}, N over N/2"] = Check(growth, LIMIT)
    facts: dict[str, int | str] = {**SHAPE._asdict(), "N": N}
    return Record("path_memory", threads, facts, entries, checks, strict=strict)


def _cases(settings: Settings) -> list[Case]:
    threads = settings.threads[0]
    lengths, repeats = ((1024,), 1) if settings.quick else ((2048, 4096, 8192), REPEATS)
    return [
        Case(
            key=f"path_memory {threads} {N}",
            label=f"D={SHAPE.D} {SHAPE.heads}/{SHAPE.kv_heads} forward+backward N={N}",
            threads=threads,
            run=partial(_measure, N, settings.quick or lengths[0] < N, threads, repeats, not settings.quick),
            work=repeats * 7.0 * N**2 * SHAPE.D * SHAPE.heads * 5,
            fixed=(5 if settings.quick else 3) * repeats * START_UP,
        )
        for N in lengths
    ]


def _growth(name: str) -> Cell:
    def cell(record: Record) -> str:
        check = record.checks.get(f"{name}, N over N/2")
        return "" if check is None else f"{check.value:.2f}"

    return cell


BENCHMARK = Benchmark(
    name="path_memory",
    about=(
        "Peak memory of forward+backward of PaTH and LUCID-PaTH in float32 over what the inputs take "
        f"(D = {SHAPE.D}, {SHAPE.heads}/{SHAPE.kv_heads} heads; gradients of q, k, v, w and β, of q, k and v for "
        f"SDPA), each in a fresh process after a small call that lets libraries set up (median of {REPEATS} processes)."
    ),
    limits=f"Asked for: linear in the length, which is at most {LIMIT} × the memory at half the length.",
    minutes="about a minute and a half",
    cases=_cases,
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
