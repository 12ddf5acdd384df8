"""Records for tests: made up, so that the conclusion is known beforehand, or computed in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lucid_lab.claims.engine.jobs import Job, Record, Store
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.scale import Scale

Rule = Callable[[Job], Record]


def fake(experiment: Any, scale: Scale, rule: Rule) -> dict[Job, Record]:
    """Made-up records for all jobs that an experiment plans, round by round."""
    done: dict[Job, Record] = {}
    while fresh := [job for job in experiment.plan(scale, done) if job not in done]:
        done |= {job: rule(job) for job in fresh}
    return done


def compute(experiment: Any, scale: Scale, folder: Path) -> Store:
    """The records of all jobs that an experiment plans, run in this process."""
    store = Store(folder)
    while fresh := [job for job in experiment.plan(scale, store) if job not in store]:
        for job in fresh:
            log = do(job, folder)
            assert log is None, Path(log).read_text()
    return store


def small_run(job: Job, accuracy: float, loss: float = 1.0, ratio: float = 1.25) -> Record:
    """The record of a small run with one accuracy everywhere, or of a timing."""
    if job.function == "small.training:time_steps":
        return {"milliseconds": [10 * ratio, 10.0], "ratio": ratio}
    settings = job.arguments
    tests = [
        {"n": n, "length": length, "accuracy": accuracy, "loss": loss}
        for length in settings["test_lengths"]
        for n in settings["test_n"]
    ]
    return {"curve": {"step": [1, 2], "loss": [3.0, loss], "seconds": [1, 2]}, "tests": tests, "parameters": 7}
