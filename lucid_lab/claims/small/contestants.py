"""Small runs side by side: contestants, the same training time for both, accuracies over seeds."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lucid_attention.nn.attention import ATTENTIONS

from ..engine.against import explain_against, outcome
from ..engine.jobs import Job
from ..engine.result import Figure, Spread, Table, bar, bars, heatmaps, spread, table
from ..engine.study import Done
from .training import SmallRun, time_job

GUESS = "a guess without order"
# About the milliseconds of one layer in a step with 1024 tokens, for the estimate of the time left.
LAYER_MILLISECONDS = 10.0


@dataclass(frozen=True)
class Change:
    """What a control changes in a run. key: part of its contestant's key. title: in words. settings: of `SmallRun`."""

    key: str
    title: str
    settings: Mapping[str, Any]


SHIFT = Change("shift", "token shift", {"token_shift": True})
MLP = Change("mlp", "MLP", {"mlp": 2.0})
LARGE_EMBEDDINGS = Change("large_embeddings", "embeddings of size 1", {"embedding_std": 1.0})
NO_POSITIONS = Change("no_positions", "no positions", {"rope": False})
LEARNED_SHARPNESS = Change(
    "learned_sharpness", "learned sharpness from 4", {"options": {"sharpness": 4.0, "learn_sharpness": True}}
)
EQUAL_TIME = "equal_time"
# The paper compares LUCID with these, beside standard attention.
RIVALS = ("path", "delta", "diff")


@dataclass(frozen=True)
class Contestant:
    """A run that is repeated with several seeds.

    key: the name by which experiments look it up. title: its short name. role: its colour in the report.
    change: the difference from the plain run, in words.
    """

    key: str
    title: str
    role: str
    run: SmallRun
    change: str = ""

    @property
    def label(self) -> str:
        """The full name in tables and figures: "softmax, token shift"."""
        return f"{self.title}, {self.change}" if self.change else self.title

    def seed(self, seed: int) -> SmallRun:
        """The run with a seed."""
        return self.run.but(seed=seed)

    def job(self, seed: int) -> Job:
        """The training with a seed."""
        layer = LAYER_MILLISECONDS * self.run.batch * self.run.length / 1024
        milliseconds = 3 + layer * self.run.layers * (1 + self.run.head_dim / 64 + self.run.mlp / 4)
        return self.seed(seed).job(f"{self.label}, seed {seed}", milliseconds)


def contestant(run: SmallRun, change: Change | None = None, role: str = "") -> Contestant:
    """A run, changed or not. Its key is the attention's name, or NAME+CHANGE. role: default the attention's name."""
    name = run.attention
    title, role = ATTENTIONS[name].title, role or name
    if change is None:
        return Contestant(name, title, role, run)
    return Contestant(f"{name}+{change.key}", title, role, run.but(**change.settings), change.title)


def softmax_and_lucid(run: SmallRun, change: Change) -> list[Contestant]:
    """Both attentions with a change."""
    return [contestant(run.but(attention=name), change) for name in ("softmax", "lucid")]


def family(run: SmallRun, names: Iterable[str] = ATTENTIONS) -> list[Contestant]:
    """The same run with every attention. A sliding window is a quarter of the sequence, so that it hides something."""
    members = []
    for name in names:
        windowed = "window" in inspect.signature(ATTENTIONS[name]).parameters
        options = {"window": run.length // 4} if windowed else run.options
        members.append(contestant(run.but(attention=name, options=options)))
    return members


def by_key(contestants: Iterable[Contestant]) -> dict[str, Contestant]:
    """Contestants by their keys, which must differ."""
    contestants = list(contestants)
    members = {member.key: member for member in contestants}
    assert len(members) == len(contestants), [member.key for member in contestants]
    return members


def training(contestants: Iterable[Contestant], seeds: Sequence[int]) -> list[Job]:
    """The training of all contestants with all seeds."""
    return [member.job(seed) for seed in seeds for member in contestants]


def timing(run: SmallRun, against: SmallRun) -> Job:
    """The job that measures the time of a step of one run over that of another."""
    return time_job(run, against, f"time of a step, {run.attention} and {against.attention}")


def equal_time(slow: SmallRun, fast: SmallRun, done: Done) -> list[Contestant]:
    """The faster run, with the steps that fit into the time of the slower run; empty before the times are known."""
    job = timing(slow, fast)
    if job not in done:
        return []
    steps = round(fast.steps * max(1.0, done[job]["ratio"]))
    return [contestant(fast, Change(EQUAL_TIME, "equal time", {"steps": steps}))]


def reached(done: Done, member: Contestant, seed: int, n: int, length: int, metric: str = "accuracy") -> float:
    """A metric of a finished run with n keys or needles at a length; NaN for a loss that diverged."""
    tests = done[member.job(seed)]["tests"]
    value = next(test[metric] for test in tests if (test["n"], test["length"]) == (n, length))
    return math.nan if value is None else float(value)


def accuracy(done: Done, member: Contestant, seeds: Sequence[int], n: int, length: int) -> Spread:
    """The accuracy in percent, over seeds."""
    return spread(reached(done, member, seed, n, length) for seed in seeds)


def worst(done: Done, member: Contestant, seeds: Sequence[int], length: int) -> float:
    """The lowest mean accuracy over the tested numbers of keys."""
    return min(accuracy(done, member, seeds, n, length).mean for n in member.run.test_n)


def mean_accuracy(done: Done, member: Contestant, seeds: Sequence[int], length: int) -> Spread:
    """The mean accuracy over the tested numbers of keys, over seeds."""
    ns = member.run.test_n
    return spread(sum(reached(done, member, seed, n, length) for n in ns) / len(ns) for seed in seeds)


def against_rivals(members: Mapping[str, Contestant], score: Callable[[Contestant], Spread]) -> tuple[bool, str]:
    """Whether LUCID is clearly ahead of every one of RIVALS, and a sentence about it.

    members: by key, without the rivals that a scale leaves out; without any of them LUCID counts as ahead.
    """
    ours, theirs = (
        score(members["lucid"]),
        {members[key].label: score(members[key]) for key in RIVALS if key in members},
    )
    ahead = all(outcome(ours, other) == "ahead" for other in theirs.values())
    return ahead, explain_against("LUCID", ours, theirs) if theirs else ""


def accuracy_table(
    title: str, done: Done, contestants: Sequence[Contestant], seeds: Sequence[int], length: int, note: str = ""
) -> Table:
    """A row for every contestant; columns for its steps and for every number of keys."""
    ns = contestants[0].run.test_n
    rows = [
        [member.label, member.run.steps, *(accuracy(done, member, seeds, n, length) for n in ns)]
        for member in contestants
    ]
    return table(title, ["", "steps", *(f"n = {n}" for n in ns)], rows, note=note)


def accuracy_bars(
    title: str,
    done: Done,
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    length: int,
    *,
    guess: bool = False,
    note: str = "",
) -> Figure:
    """A group for every number of keys. guess: with a bar for `chance_of_guessing`."""
    groups = {}
    for n in contestants[0].run.test_n:
        member_bars = [
            bar(member.label, member.role, accuracy(done, member, seeds, n, length)) for member in contestants
        ]
        groups[f"n = {n}"] = [*member_bars, *([bar(GUESS, "control", chance_of_guessing(n, length))] if guess else [])]
    return bars(title, "accuracy, %", groups, range=(0, 100), note=note)


def accuracy_maps(
    title: str, done: Done, contestants: Sequence[Contestant], seeds: Sequence[int], rows: str, note: str = ""
) -> Figure:
    """Numbers of keys against lengths, a map for every contestant."""
    panels = {}
    for member in contestants:
        ns, lengths = member.run.test_n, member.run.test_lengths
        values = [[accuracy(done, member, seeds, n, length).mean for length in lengths] for n in ns]
        panels[member.label] = (ns, lengths, values)
    return heatmaps(title, rows, "length", panels, range=(0, 100), unit="%", note=note)


def chance_of_guessing(n: int, length: int) -> float:
    """Accuracy, in percent, of naming any value that was written under the asked key: the best guess without the order.

    The n keys are written length − n times in all: each once, the rest at random.
    """
    # E[1 / (1 + X)] for X writes beyond the first, X ~ Binomial(m, 1/n): (1 − (1 − 1/n)^(m + 1)) n / (m + 1).
    m = length - 2 * n
    return 100 * (1 - (1 - 1 / n) ** (m + 1)) * n / (m + 1)
