"""The growth of time and memory with the length. `report.plot_growth` draws it."""

from dataclasses import replace
from functools import partial

import torch

from .. import gate
from ..gate import Shape, evaluate
from ..harness import Run, Spread, race, ratios
from ..report import PICTURE, fact, megabytes, milliseconds
from ..results import Benchmark, Case, Column, Entry, Record, Settings
from . import peers
from .memory import START_UP, Job, measure_cost
from .peers import DENSE, OURS, SDPA
from .solve import COST, check_truth

SHAPE = Shape(64, 2, 2)
DENSE_LENGTH = 8192


def _names(N: int) -> tuple[str, ...]:
    return (SDPA, OURS, DENSE) if N <= DENSE_LENGTH else (SDPA, OURS)


def _measure(N: int, threads: int, settings: Settings) -> Record:
    check_truth("growth", SHAPE, True, torch.float32, _names(N))
    tensors = gate.inputs(*SHAPE, N)
    names = _names(N)
    runs: dict[str, Run] = {name: partial(evaluate, peers.ATTENTIONS[name].run, tensors, True) for name in names}
    times = race(runs, budget=settings.budget, seed=f"growth {N}", brief={DENSE}, least=settings.least)
    entries = {name: Entry(Spread.of(times[name]), ratios(times[name], times[SDPA])) for name in names}
    for name in names:
        cost = measure_cost(Job(name, *SHAPE, N, True, threads))
        entries[name] = replace(entries[name], megabytes=cost.megabytes)
    return Record("growth", threads, {**SHAPE._asdict(), "N": N}, entries)


def _cases(settings: Settings) -> list[Case]:
    lengths = (1024,) if settings.quick else (1024, 2048, 4096, 8192, 16384)
    threads = settings.threads[0]
    cases = []
    for N in lengths:
        attention = 7.0 * N**2 * SHAPE.D * SHAPE.heads
        slow = attention * (1 + COST[DENSE]) if N <= DENSE_LENGTH else 0.0
        cases.append(
            Case(
                key=f"growth {threads} {N}",
                label=f"D={SHAPE.D} {SHAPE.heads}/{SHAPE.kv_heads} forward+backward N={N}",
                threads=threads,
                run=partial(_measure, N, threads, settings),
                work=3 * attention,
                once=5 * slow + 3 * attention,
                fixed=START_UP * len(_names(N)),
                budget=settings.budget,
            )
        )
    return cases


BENCHMARK = Benchmark(
    name="growth",
    about=(
        "Time and peak memory of forward+backward against the length, one small shape in float32 "
        f"(D = {SHAPE.D}, {SHAPE.heads}/{SHAPE.kv_heads} heads): torch's attention, ours, and the dense triangular "
        f"solve up to N = {DENSE_LENGTH}. Draws {PICTURE}."
    ),
    limits="",
    cases=_cases,
    columns=(
        Column("N", fact("N")),
        *(Column(f"{name}, ms", milliseconds(name)) for name in (SDPA, OURS, DENSE)),
        *(Column(f"{name}, MB", megabytes(name)) for name in (SDPA, OURS, DENSE)),
    ),
)
