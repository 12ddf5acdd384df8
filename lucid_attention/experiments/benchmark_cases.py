"""Cases of the benchmarks as jobs. The benchmarks are in the checkout, beside the package, not in it."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from .engine.jobs import Job, Record, Work
from .engine.study import ExperimentError

FOLDER = "benchmarks"
# Median and quartiles.
Percents = tuple[float, float, float]
CHECKOUT = Path(__file__).parents[2]


def require_checkout(name: str) -> None:
    """Say so before anything runs where the benchmarks are not there."""
    if not (CHECKOUT / FOLDER / "__main__.py").exists():
        raise ExperimentError(
            f"{name} runs the benchmarks, which are in the project's repository and not in the installed package: "
            f"there is no {CHECKOUT / FOLDER}. Install from a checkout with `pip install -e .`, and run it there"
        )


def module(name: str) -> Any:
    """A module of the benchmarks."""
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(f"{FOLDER}.{name}")


def case_job(benchmark: str, case: str, label: str, seconds: float, *, quick: bool = False) -> Job:
    """One case of a benchmark on one thread, by its key; nothing runs beside it."""
    arguments = {"benchmark": benchmark, "case": case, "quick": quick}
    return Job("benchmark_cases:run_case", arguments, label, 2.0 if quick else seconds, alone=True)


def run_case(work: Work, benchmark: str, case: str, quick: bool) -> Record:
    """The job: what the benchmark keeps of the case. Its contestants are checked first, as `python -m benchmarks` does.

    quick: in sizes that only prove that it runs.
    """
    settings = module("results").Settings(threads=(1,), quick=quick)
    cases = {each.key: each for each in module(benchmark).BENCHMARK.cases(settings)}
    if case not in cases:
        raise ValueError(f"case must be one of {', '.join(cases)}, got {case!r}")
    with module("harness").threads(1):
        found = asdict(cases[case].run())
    record: Record = json.loads(json.dumps(found))
    return record


def prediction_job(lengths: list[int]) -> Job:
    """`predicted_overheads` as a job."""
    arguments = {"lengths": lengths}
    return Job("benchmark_cases:predicted_overheads", arguments, "count of operations", 1.0)


def predicted_overheads(work: Work, lengths: list[int]) -> Record:
    """The job: what LUCID adds to a training step by the count of operations, in percent by model and length."""
    shapes = module("model_training").SHAPES
    return {shape.name: [100 * (shape.predicted(length, head=True) - 1) for length in lengths] for shape in shapes}


def percent(record: Record, name: str) -> Percents:
    """By how much a contestant is slower than what it is held against: median and quartiles, in percent."""
    ratio = record["entries"][name]["ratio"]
    return 100 * (ratio["median"] - 1), 100 * (ratio["low"] - 1), 100 * (ratio["high"] - 1)


def shown(values: Percents) -> str:
    """`+1.3 % (+0.8 to +2.0)`."""
    return f"{values[0]:+.1f} % ({values[1]:+.1f} to {values[2]:+.1f})"
