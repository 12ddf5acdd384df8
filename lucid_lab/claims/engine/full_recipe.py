"""The full recipes: the commands of experiments one after another, at the paper's scale or rehearsed."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lucid_attention.files import read_json, write_whole

from ...fingerprint import fingerprint
from ...locks import locked
from ...training.estimate import Estimate
from .full_scale import conclude_full
from .pool import clock
from .rehearsal import SIZES, rehearsed
from .scale import REHEARSAL, Scale
from .stand_ins import make_stand_ins
from .steps import Step, check_steps
from .study import NOT_JUDGED, load, save_result
from .warm import LIBRARIES, PROGRAM, run_warm

# The folder below OUT in which a rehearsal runs, and its list of finished steps.
WORK, DONE = "rehearsal", "steps.json"
# Commands that do nothing, or almost nothing, if they are finished. Others are not run again if their result is there.
RESUMED = ("tokenize", "train", "eval", "bench", "experiment")
# About the seconds of the commands of a rehearsal on two cores, in proportion to each other.
SECONDS = {"tokenize": 15.0, "train": 5.0, "eval": 8.0, "make-data": 3.0, "analyze": 8.0, "bench": 20.0}
EXPERIMENT_SECONDS = 40.0


Result = dict[str, Any]


def steps_of(name: str, scale: Scale) -> list[Step]:
    """The commands of an experiment: those of the full recipe, or each of them rehearsed."""
    steps = load(name).paper()
    return [rehearsed(step) for step in steps] if scale is REHEARSAL else steps


def gpu_hours(estimates: Iterable[Estimate | None]) -> float:
    """The hours of all GPUs together."""
    return sum(needs.gpu_hours for needs in estimates if needs is not None)


def run_full_recipes(
    names: Sequence[str], scale: Scale, out: Path, *, then: Callable[[Result], object], restart: bool = False
) -> int:
    """Run the commands of experiments, and write the results of each one. Returns an exit code.

    Another run in `out` is refused meanwhile. A command that several experiments share runs once. Every command resumes
    where it was stopped, and does nothing if it is finished.

    then: called with every result. restart: forget an earlier rehearsal.
    """
    recipes = {name: steps_of(name, scale) for name in names}
    for steps in recipes.values():
        check_steps(steps)
    with locked(out, f"lucid experiment {' '.join(names)} --scale {scale.name}"):
        root = _rehearsal_folder(out, restart) if scale is REHEARSAL else Path()
        run = _Run(recipes, scale, root)
        for name, steps in recipes.items():
            start = time.monotonic()
            for step in steps:
                code = run.do(step)
                if code:
                    return code
            then(judge_full_recipe(name, scale, out, time.monotonic() - start))
    return 0


def judge_full_recipe(name: str, scale: Scale, out: Path, seconds: float = 0.0) -> Result:
    """Judge what the commands have written, and write OUT/NAME-SCALE/result.json. Returns it.

    The rule of a rehearsal's verdict runs, too, but its verdict means nothing.
    """
    experiment, steps, command = load(name), steps_of(name, scale), f"lucid experiment {name} --scale {scale.name}"
    if scale is REHEARSAL:
        conclusion = conclude_full(experiment, steps, out.absolute() / WORK, SIZES)
        if conclusion.verdict != "incomplete":
            conclusion = replace(conclusion, verdict="too small to judge", because=NOT_JUDGED)
    else:
        conclusion = conclude_full(experiment, steps)
    return save_result(experiment.CLAIM, conclusion, name, scale, out, command, seconds)


def _rehearsal_folder(out: Path, restart: bool) -> Path:
    """The folder of the rehearsal, with its stand-ins; empty after an edit of the code."""
    root, code = out.absolute() / WORK, _code()
    if root.exists() and (restart or _done(root).get("code") != code):
        shutil.rmtree(root)
    root.mkdir(parents=True, exist_ok=True)
    make_stand_ins(root)
    if not (root / DONE).exists():
        write_whole(root / DONE, json.dumps({"code": code, "lines": []}))
    return root


def _code() -> str:
    """The fingerprint of all commands."""
    modules = (PROGRAM, __name__, *(name for name in LIBRARIES if name.startswith("lucid_attention.")))
    return " ".join(map(fingerprint, modules))


def _done(root: Path) -> dict[str, object]:
    try:
        return dict(read_json(root / DONE))
    except (OSError, ValueError):
        return {}


class _Run:
    """Steps that run in a folder, with the time left."""

    def __init__(self, recipes: Mapping[str, Sequence[Step]], scale: Scale, root: Path) -> None:
        self.scale, self.root = scale, root
        self.steps = list(dict.fromkeys(step for steps in recipes.values() for step in steps))
        lines = _done(root).get("lines", []) if scale is REHEARSAL else []
        self.lines = [str(line) for line in lines] if isinstance(lines, list) else []
        self.finished: set[Step] = {step for step in self.steps if self._is_there(step)}
        self.left = sum(map(_expected, self.steps)) - sum(map(_expected, self.finished))
        self.began, self.passed = time.monotonic(), 0.0

    def _is_there(self, step: Step) -> bool:
        """Whether the result of a step is there, and running the step again would repeat or refuse it."""
        exists = (self.root / step.writes()).exists()
        if self.scale is REHEARSAL:
            return exists and step.line in self.lines
        return exists and step.words[0] not in RESUMED

    def do(self, step: Step) -> int:
        """Run a step, unless it is finished. Returns its exit code."""
        if step in self.finished:
            return 0
        print(f"{self.steps.index(step) + 1}/{len(self.steps)}{self._time_left()}: {step.line}", flush=True)
        code = run_warm(step, self.root) if self.scale is REHEARSAL else step.run()
        if code:
            ended = f"step {self.steps.index(step) + 1} of {len(self.steps)} ended with {code}: {step.line}"
            print(f"lucid experiment: {ended}", file=sys.stderr)
            return code
        self.finished.add(step)
        self.left -= _expected(step)
        self.passed += _expected(step)
        if self.scale is REHEARSAL:
            self.lines.append(step.line)
            write_whole(self.root / DONE, json.dumps({"code": _code(), "lines": self.lines}))
        return 0

    def _time_left(self) -> str:
        """Of a rehearsal: from the steps that have run. The hours of a full recipe are those of its dry run."""
        if self.scale is not REHEARSAL or not self.passed:
            return ""
        return f", {clock((time.monotonic() - self.began) * self.left / self.passed)} left"


def _expected(step: Step) -> float:
    seconds = SECONDS.get(step.words[0], EXPERIMENT_SECONDS)
    # Needles at all lengths and numbers are most of the cells.
    return 8 * seconds if "sniah,mniah" in step.words else seconds
