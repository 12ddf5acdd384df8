"""Run an experiment: plan, do what is not done, plan again, conclude."""

import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ...base.files import write_whole
from .jobs import ROOM, Job, Record, Store
from .pool import run_jobs
from .progress import Progress
from .result import FORMAT, RESULT, Claim, Conclusion
from .steps import Step

# In the order in which they build on each other.
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
    "compute_matched",
    "needle_lm",
    "babilong",
    "longqa",
    "operator_cost",
    "training_overhead",
    "decode_latency",
)
SCALES = ("smoke", "small", "paper")
JOBS = "jobs"


Done = Mapping[Job, Record]


class ExperimentError(Exception):
    """Why an experiment cannot run, in a sentence."""


class Experiment(Protocol):
    """A module of this room with the name of a claim."""

    CLAIM: Claim

    def plan(self, scale: str, done: Done) -> list[Job]:
        """The jobs that are known to be needed, given those that are done. Asked again until all of them are."""

    def conclude(self, scale: str, done: Done) -> Conclusion:
        """What the records say."""

    def paper(self) -> list[Step]:
        """The commands of the full recipe."""


def load(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        near = get_close_matches(name, EXPERIMENTS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ExperimentError(f"there is no experiment {name!r}{hint}: {', '.join(EXPERIMENTS)}, or list")
    return cast("Experiment", import_module(f"{ROOM}.{name}"))


def run_experiment(
    name: str, scale: str, out: Path, *, processes: int | None = None, restart: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Run what is not finished in `out`, conclude, and write OUT/NAME-SCALE/result.json. Gives what is written there.

    processes: jobs at a time. restart: do everything again.
    """
    if restart:
        _forget(load(name), scale, Store(Path(out) / JOBS))
    command = f"lucid experiment {name} --scale {scale}"
    return run_together([name], scale, out, command, processes=processes, quiet=quiet)[0]


def run_together(
    names: Sequence[str], scale: str, out: Path, command: str, *, processes: int | None = None, quiet: bool = False
) -> list[dict[str, Any]]:
    """Run several experiments at once, with one time left. command: that the report names."""
    experiments, store = {name: load(name) for name in names}, Store(Path(out) / JOBS)
    progress = Progress(quiet=quiet)
    known: set[Job] = set()
    try:
        while True:
            planned = {name: list(dict.fromkeys(each.plan(scale, store))) for name, each in experiments.items()}
            jobs = dict.fromkeys(job for each in planned.values() for job in each)
            fresh = [job for job in jobs if job not in known and job not in store]
            known |= set(jobs)
            if not fresh:
                break
            progress.add(fresh)
            run_jobs(fresh, store, progress, processes)
    finally:
        progress.close()
    results = []
    for name, each in experiments.items():
        entries = [store.entry(job) or {} for job in planned[name]]
        seconds = sum(float(entry.get("seconds", 0)) for entry in entries)
        conclusion, day = each.conclude(scale, store), _newest(store, planned[name])
        results.append(save_result(each.CLAIM, conclusion, name, scale, Path(out), command, seconds, day))
    return results


def _forget(experiment: Experiment, scale: str, store: Store) -> None:
    """Later rounds first: an end in between leaves nothing that no plan names any more."""
    while jobs := [job for job in experiment.plan(scale, store) if job in store]:
        for job in reversed(jobs):
            store.forget(job)
            shutil.rmtree(store.folder_of(job), ignore_errors=True)


def save_result(
    claim: Claim,
    conclusion: Conclusion,
    name: str,
    scale: str,
    out: Path,
    command: str,
    seconds: float,
    finished: str | None = None,
) -> dict[str, Any]:
    """Write OUT/NAME-SCALE/result.json, and give what is written."""
    result = {
        "format": FORMAT,
        "name": name,
        "scale": scale,
        "title": claim.title,
        "section": claim.section,
        "claim": claim.says,
        "paper": claim.paper,
        "ours": conclusion.ours,
        "verdict": conclusion.verdict,
        "because": conclusion.because,
        "command": command,
        "machine": machine(),
        "finished": finished or datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds, 1),
        "seeds": conclusion.seeds,
        "figures": list(conclusion.figures),
        "tables": list(conclusion.tables),
    }
    folder = out / f"{name}-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RESULT, json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False))
    return result


def _newest(store: Store, jobs: Sequence[Job]) -> str:
    """The day on which the last record was written: concluding again changes nothing."""
    times = [(store.folder_of(job) / "record.json").stat().st_mtime for job in jobs if job in store]
    return datetime.fromtimestamp(max(times, default=time.time()), UTC).date().isoformat()


def machine() -> str:
    """What the numbers depend on, in a line."""
    cpu = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        pass
    if torch.cuda.is_available():
        cpu = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, {cpu}"
    return f"{os.cpu_count()} cores of {cpu}, torch {torch.__version__}, Python {platform.python_version()}"
