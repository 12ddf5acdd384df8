"""Small runs side by side: names, seeds, equal time, and accuracies over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...nn.attention import ATTENTIONS
from ..engine.jobs import Job
from ..engine.result import Figure, Spread, Table, bar, bars, heatmaps, spread, table
from ..engine.study import Done
from .training import SmallRun, time_job

GUESS = "a guess without order"
# Of a layer and step with 1024 tokens, about: for the time left.
MILLISECONDS = {"lucid": 8, "path": 13, "lucid_path": 20, "delta": 13, "gated_delta": 14, "gla": 12, "gsa": 24}


@dataclass(frozen=True)
class Contestant:
    """A run that is repeated with several seeds. role: its colour in the report."""

    name: str
    role: str
    run: SmallRun

    def seed(self, seed: int) -> SmallRun:
        """The run with a seed."""
        return self.run.but(seed=seed)

    def job(self, seed: int) -> Job:
        """Its training with a seed."""
        layer = MILLISECONDS.get(self.run.attention, 5) * self.run.batch * self.run.length / 1024
        milliseconds = 3 + layer * self.run.layers * (1 + self.run.head_dim / 64 + self.run.mlp / 4)
        return self.seed(seed).job(f"{self.name}, seed {seed}", milliseconds)


def family(run: SmallRun, names: Iterable[str] = ATTENTIONS) -> list[Contestant]:
    """The same run with every attention. A window is a quarter of the sequence: otherwise it would be softmax."""
    windows: Mapping[str, Mapping[str, Any]] = {"sliding": {"window": run.length // 4}}
    return [
        Contestant(ATTENTIONS[name].title, name, run.but(attention=name, options=windows.get(name, run.options)))
        for name in names
    ]


def training(contestants: Iterable[Contestant], seeds: Sequence[int]) -> list[Job]:
    """All their jobs."""
    return [each.job(seed) for seed in seeds for each in contestants]


def timing(run: SmallRun, than: SmallRun) -> Job:
    """How long a step of one takes, over that of another."""
    return time_job(run, than, f"time of a step, {run.attention} and {than.attention}")


def given_the_time_of(slow: SmallRun, fast: SmallRun, done: Done, name: str) -> Contestant | None:
    """The faster run with as many steps as fit into the time of the slower one; None before that is measured."""
    measured = timing(slow, fast)
    if measured not in done:
        return None
    steps = round(fast.steps * max(1.0, done[measured]["ratio"]))
    return Contestant(name, fast.attention, fast.but(steps=steps))


def reached(done: Done, contestant: Contestant, seed: int, n: int, length: int, what: str = "accuracy") -> float:
    """What a finished run got with n keys or needles at a length; NaN for a loss that diverged."""
    tests = done[contestant.job(seed)]["tests"]
    value = next(each[what] for each in tests if (each["n"], each["length"]) == (n, length))
    return math.nan if value is None else float(value)


def accuracy(done: Done, contestant: Contestant, seeds: Sequence[int], n: int, length: int) -> Spread:
    """In percent, over seeds."""
    return spread(reached(done, contestant, seed, n, length) for seed in seeds)


def worst(done: Done, contestant: Contestant, seeds: Sequence[int], length: int) -> float:
    """The lowest mean accuracy over the tested numbers of keys."""
    return min(accuracy(done, contestant, seeds, n, length).mean for n in contestant.run.test_n)


def mean_accuracy(done: Done, contestant: Contestant, seeds: Sequence[int], length: int) -> Spread:
    """Over the tested numbers of keys, then over seeds."""
    ns = contestant.run.test_n
    return spread(sum(reached(done, contestant, seed, n, length) for n in ns) / len(ns) for seed in seeds)


def accuracy_table(
    title: str, done: Done, contestants: Sequence[Contestant], seeds: Sequence[int], length: int, note: str = ""
) -> Table:
    """A row a contestant, a column for every number of keys, and its steps."""
    ns = contestants[0].run.test_n
    rows = [[each.name, each.run.steps, *(accuracy(done, each, seeds, n, length) for n in ns)] for each in contestants]
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
    """A group for every number of keys. guess: with a bar for what can be had without order."""
    groups = {}
    for n in contestants[0].run.test_n:
        drawn = [bar(each.name, each.role, accuracy(done, each, seeds, n, length)) for each in contestants]
        groups[f"n = {n}"] = [*drawn, *([bar(GUESS, "control", chance_of_guessing(n, length))] if guess else [])]
    return bars(title, "accuracy, %", groups, range=(0, 100), note=note)


def accuracy_maps(
    title: str, done: Done, contestants: Sequence[Contestant], seeds: Sequence[int], rows: str, note: str = ""
) -> Figure:
    """Numbers of keys against lengths, a map a contestant."""
    panels = {}
    for each in contestants:
        ns, lengths = each.run.test_n, each.run.test_lengths
        values = [[accuracy(done, each, seeds, n, length).mean for length in lengths] for n in ns]
        panels[each.name] = (ns, lengths, values)
    return heatmaps(title, rows, "length", panels, range=(0, 100), unit="%", note=note)


def chance_of_guessing(n: int, length: int) -> float:
    """Accuracy, in percent, of naming any value that was written under the asked key: what can be had without order.

    The n keys are written length − n times in all: each once, the rest at random.
    """
    # E[1 / (1 + X)] for X writes beyond the first, X ~ Binomial(m, 1/n): (1 − (1 − 1/n)^(m + 1)) n / (m + 1).
    more = length - 2 * n
    return 100 * (1 - (1 - 1 / n) ** (more + 1)) * n / (more + 1)
