"""Records that nobody computed: what an experiment concludes from them is known beforehand."""

from collections.abc import Callable
from typing import Any

from lucid_attention.experiments.engine.jobs import Job, Record
from lucid_attention.experiments.engine.study import Experiment

Rule = Callable[[Job], Record]


def fake(experiment: Any, scale: str, rule: Rule) -> dict[Job, Record]:
    """Records for all that an experiment plans, round by round."""
    module: Experiment = experiment
    done: dict[Job, Record] = {}
    while fresh := [job for job in module.plan(scale, done) if job not in done]:
        done |= {job: rule(job) for job in fresh}
    return done


def small_run(job: Job, accuracy: float, loss: float = 1.0, ratio: float = 1.25) -> Record:
    """The record of a small run with one accuracy everywhere, or of a timing."""
    if job.function == "small.training:time_steps":
        return {"milliseconds": [10 * ratio, 10.0], "ratio": ratio}
    wanted = job.arguments
    tests = [
        {"n": n, "length": length, "accuracy": accuracy, "loss": loss}
        for length in wanted["test_lengths"]
        for n in wanted["test_n"]
    ]
    return {"curve": {"step": [1, 2], "loss": [3.0, loss], "seconds": [1, 2]}, "tests": tests, "parameters": 7}
