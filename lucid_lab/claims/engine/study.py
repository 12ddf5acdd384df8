"""Run an experiment: plan, run the jobs that are not finished, plan again, conclude, write the result."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from lucid_attention.files import write_record
from lucid_attention.messages import did_you_mean

from ...bench.harness import machine
from ...locks import locked
from ...report.records import FORMAT, RESULT
from .jobs import RECORD, ROOM, Job, Record, Store
from .pool import Progress, run_jobs
from .result import Claim, Conclusion
from .rules import RULES
from .scale import Scale
from .steps import Step
from .verdict import Judged

# An experiment comes after those whose models it uses.
EXPERIMENTS = (
    "memory_update",
    "needle_grid",
    "learnability",
    "condition_number",
    "hit_rate",
    "language_model",
    "warm_start",
    "variants",
    "finetuning_length",
    "length_extrapolation",
    "hybrid",
    "compute_matched",
    "needle_lm",
    "babilong",
    "longqa",
    "operator_cost",
    "training_overhead",
    "decode_latency",
    "pretrained",
)
JOBS = "jobs"
NOT_JUDGED = "A run of this size shows that the parts fit together; its numbers say nothing about the claim."


Done = Mapping[Job, Record]


class ExperimentError(Exception):
    """Why an experiment cannot run, in a sentence."""


class Experiment(Judged, Protocol):
    """A module of `lucid_lab.claims`, named for a claim."""

    CLAIM: Claim

    def plan(self, scale: Scale, done: Done) -> list[Job]:
        """The jobs that are known to be needed, given those that are done. Called again until all of them are done."""

    def conclude(self, scale: Scale, done: Done) -> Conclusion:
        """The conclusion from the records."""

    def paper(self) -> list[Step]:
        """The commands of the full recipe."""


def load(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        hint = did_you_mean(name, EXPERIMENTS)
        raise ExperimentError(f"there is no experiment {name!r}{hint}: {', '.join(EXPERIMENTS)}, all or list")
    return cast("Experiment", import_module(f"{ROOM}.{name}"))


def lacks(name: str, scale: Scale) -> str | None:
    """Why an experiment cannot run here, in a sentence: what it has to be given. None if it can run."""
    reason: str | None = getattr(load(name), "lacks", lambda scale: None)(scale)
    return reason


def run_experiment(
    name: str, scale: Scale, out: Path, *, processes: int | None = None, restart: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Run the jobs that are not finished in `out`, conclude, and write OUT/NAME-SCALE/result.json. Returns the result.

    processes: jobs at a time. restart: run finished jobs again.
    """
    command = f"lucid experiment {name} --scale {scale.name}"
    command += f" --model {scale.model} --texts {scale.texts}" if scale.model else ""
    return run_together([name], scale, out, command, processes=processes, restart=restart, quiet=quiet)[0]


def run_together(
    names: Sequence[str],
    scale: Scale,
    out: Path,
    command: str,
    *,
    processes: int | None = None,
    restart: bool = False,
    quiet: bool = False,
    then: Callable[[list[dict[str, Any]]], object] | None = None,
) -> list[dict[str, Any]]:
    """Run several experiments at once, with one estimate of the time left. Another run in `out` is refused meanwhile.

    command: for the report and for the run that is refused.
    then: called with the results while no other run may write into `out`.
    """
    experiments, store = {name: load(name) for name in names}, Store(Path(out) / JOBS)
    for name in names:
        reason = lacks(name, scale)
        if reason is not None:
            raise ExperimentError(f"{name} cannot run: {reason}")
    with locked(Path(out), command):
        store.sweep()
        if restart:
            for experiment in experiments.values():
                _forget(experiment, scale, store)
        planned = _run_planned(experiments, scale, store, processes, Progress(quiet=quiet))
        results = _conclude_all(experiments, planned, scale, store, Path(out), command)
        if then is not None:
            then(results)
    return results


def _run_planned(
    experiments: Mapping[str, Experiment], scale: Scale, store: Store, processes: int | None, progress: Progress
) -> dict[str, list[Job]]:
    """Plan and run until no job is new. Returns the jobs of each experiment."""
    known_jobs: set[Job] = set()
    try:
        while True:
            planned = {
                name: list(dict.fromkeys(experiment.plan(scale, store))) for name, experiment in experiments.items()
            }
            jobs = dict.fromkeys(job for plan in planned.values() for job in plan)
            new_jobs = [job for job in jobs if job not in known_jobs and job not in store]
            known_jobs |= set(jobs)
            if not new_jobs:
                return planned
            for job in new_jobs:
                if job in store.damaged:
                    print(f"{store.damaged[job]}. The job runs again", file=sys.stderr, flush=True)
                    store.forget(job)
            progress.add(new_jobs)
            run_jobs(new_jobs, store, progress, processes)
    finally:
        progress.close()


def _conclude_all(
    experiments: Mapping[str, Experiment],
    planned: Mapping[str, Sequence[Job]],
    scale: Scale,
    store: Store,
    out: Path,
    command: str,
) -> list[dict[str, Any]]:
    results = []
    for name, experiment in experiments.items():
        entries = [store.entry(job) or {} for job in planned[name]]
        seconds = sum(float(entry.get("seconds", 0)) for entry in entries)
        conclusion, day = conclude(experiment, scale, store), _newest(store, planned[name])
        results.append(save_result(experiment.CLAIM, conclusion, name, scale, out, command, seconds, day))
    return results


def conclude(experiment: Experiment, scale: Scale, done: Done) -> Conclusion:
    """The conclusion of an experiment from its records. A tiny scale has no verdict."""
    conclusion = experiment.conclude(scale, done)
    if scale.tiny:
        return replace(conclusion, verdict="too small to judge", because=NOT_JUDGED)
    return conclusion


def _forget(experiment: Experiment, scale: Scale, store: Store) -> None:
    """Forget the jobs of all rounds, the last round first: after a stop, `plan` still names every job that is left."""
    while jobs := [job for job in experiment.plan(scale, store) if job in store]:
        for job in reversed(jobs):
            store.forget(job)


def save_result(
    claim: Claim,
    conclusion: Conclusion,
    name: str,
    scale: Scale,
    out: Path,
    command: str,
    seconds: float,
    finished: str | None = None,
) -> dict[str, Any]:
    """Write OUT/NAME-SCALE/result.json. Returns the result."""
    result = {
        "format": FORMAT,
        "name": name,
        "scale": scale.name,
        "title": claim.title,
        "section": claim.section,
        "claim": claim.says,
        "paper": claim.paper,
        "ours": conclusion.ours,
        "verdict": conclusion.verdict,
        "because": conclusion.because,
        "rule": str(RULES[name]) if name in RULES else "",
        "command": command,
        "machine": _machine_line(),
        "finished": finished or datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        "seeds": conclusion.seeds,
        "figures": list(conclusion.figures),
        "tables": list(conclusion.tables),
    }
    write_record(result_file(name, scale, out), result, allow_nan=False)
    return result


def result_file(name: str, scale: Scale, out: Path) -> Path:
    """The file of an experiment's result."""
    return out / f"{name}-{scale.name}" / RESULT


def _newest(store: Store, jobs: Sequence[Job]) -> str:
    """The day of the newest record, so that concluding again changes nothing."""
    times = [(store.folder_of(job) / RECORD).stat().st_mtime for job in jobs if job in store]
    return datetime.fromtimestamp(max(times, default=time.time()), UTC).date().isoformat()


def _machine_line() -> str:
    """Processor, torch and Python, which the numbers depend on, in a line."""
    about = machine()
    gpu = f"{about['GPU']}, " if "GPU" in about else ""
    return f"{gpu}{about['CPU']}, cores: {about['cores']}, torch {about['torch']}, Python {about['Python']}"
