"""Arms of a comparison: contestants as data, trained with every seed, read as accuracies over seeds."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lucid_attention.nn.attention import ATTENTIONS

from .lab import Lab, Record
from .results import Figure, Spread, Table, bar, bars, explain_against, heatmaps, lines, outcome, series, spread, table
from .training import Toy, time_steps, train

EQUAL_TIME = "equal_time"
# The paper compares LUCID with these, apart from standard attention.
RIVALS = ("path", "delta", "diff")


@dataclass(frozen=True)
class Change:
    """What a control changes. key: part of its arm's key. title: in words. settings: of `Toy`."""

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


@dataclass(frozen=True)
class Arm:
    """A toy that is trained with several seeds.

    key: the name by which a claim looks it up. title: its short name. role: its colour in the report.
    change: the difference from the plain toy, in words.
    """

    key: str
    title: str
    role: str
    toy: Toy
    change: str = ""

    @property
    def label(self) -> str:
        """The full name in tables and figures: "softmax, token shift"."""
        return f"{self.title}, {self.change}" if self.change else self.title


def arm(toy: Toy, change: Change | None = None, role: str = "") -> Arm:
    """A toy, changed or not. Its key is the attention's name, or NAME+CHANGE. role: default the attention's name."""
    name = toy.attention
    title, role = ATTENTIONS[name].title, role or name
    if change is None:
        return Arm(name, title, role, toy)
    return Arm(f"{name}+{change.key}", title, role, toy.but(**change.settings), change.title)


def softmax_and_lucid(toy: Toy, change: Change) -> list[Arm]:
    """Both attentions with a change."""
    return [arm(toy.but(attention=name), change) for name in ("softmax", "lucid")]


def family(toy: Toy, names: Iterable[str] = ATTENTIONS) -> list[Arm]:
    """The same toy with every attention. A sliding window is a quarter of the sequence, so that it hides something."""
    members = []
    for name in names:
        windowed = "window" in inspect.signature(ATTENTIONS[name]).parameters
        options = {"window": toy.length // 4} if windowed else toy.options
        members.append(arm(toy.but(attention=name, options=options)))
    return members


def time_ratios(lab: Lab, pairs: Mapping[str, tuple[Toy, Toy]]) -> dict[str, Record]:
    """For every (slow, fast): "milliseconds" of a training step of both, taken in turn, and "ratio", slow to fast."""
    settings = [{"slow": slow, "fast": fast} for slow, fast in pairs.values()]
    return dict(zip(pairs, lab.map(time_steps, settings, title="time of a step", alone=True), strict=True))


def equal_time(fast: Toy, timing: Record) -> Arm:
    """The faster toy with the steps that fit into the time of the slower one. timing: of `time_ratios`."""
    steps = round(fast.steps * max(1.0, timing["ratio"]))
    return arm(fast, Change(EQUAL_TIME, "equal time", {"steps": steps}))


@dataclass(frozen=True)
class Trained:
    """An arm after its training: a record of `train` for every seed."""

    arm: Arm
    records: Sequence[Record]

    def values(self, n: int, length: int, metric: str = "accuracy") -> list[float]:
        """A metric of the test with n keys at a length, for every seed; NaN for a loss that diverged."""
        found = [
            next(test[metric] for test in record["tests"] if (test["n"], test["length"]) == (n, length))
            for record in self.records
        ]
        return [math.nan if value is None else float(value) for value in found]

    def accuracy(self, n: int, length: int) -> Spread:
        """The accuracy in percent, over seeds."""
        return spread(self.values(n, length))

    def mean_accuracy(self, length: int, ns: Sequence[int] = ()) -> Spread:
        """The mean accuracy over numbers of keys (default: all that are tested), over seeds."""
        by_n = [self.values(n, length) for n in ns or self.arm.toy.test_n]
        return spread(sum(values) / len(values) for values in zip(*by_n, strict=True))

    def worst(self, length: int) -> float:
        """The lowest mean accuracy over the tested numbers of keys."""
        return min(self.accuracy(n, length).mean for n in self.arm.toy.test_n)

    def curve(self) -> tuple[list[float], list[Spread]]:
        """Steps, and the training loss over seeds; NaN where it diverged."""
        curves = [record["curve"] for record in self.records]
        points = zip(*(curve["loss"] for curve in curves), strict=True)
        losses = [spread((math.nan if loss is None else loss for loss in point), 3) for point in points]
        return list(curves[0]["step"]), losses

    def steps_below(self, loss: float) -> list[int | None]:
        """For every seed the step at which its training loss is below this for the first time; None if it never is."""
        curves = [zip(record["curve"]["step"], record["curve"]["loss"], strict=True) for record in self.records]
        return [next((step for step, value in curve if value is not None and value < loss), None) for curve in curves]

    @property
    def seconds(self) -> float:
        """Processor time of the training, mean over seeds."""
        return spread(record["seconds"] for record in self.records).mean


Group = dict[str, Trained]


def train_arms(lab: Lab, groups: Mapping[str, Sequence[Arm]], seeds: Sequence[int] = ()) -> dict[str, Group]:
    """Train all arms of all groups with every seed (default: those of the scale). Returns them by group and key."""
    settings = {
        (name, member.key): [member.toy.but(seed=seed) for seed in seeds or lab.seeds]
        for name, group in groups.items()
        for member in group
    }
    assert len(settings) == sum(map(len, groups.values())), "two arms of a group have the same key"
    records = lab.map_groups(train, settings, title="training")
    return {
        name: {member.key: Trained(member, records[name, member.key]) for member in group}
        for name, group in groups.items()
    }


def against_rivals(group: Group, score: Callable[[Trained], Spread]) -> tuple[bool, str]:
    """Whether LUCID is clearly ahead of every one of RIVALS, and a sentence about it.

    group: may lack rivals that a scale leaves out; without any of them LUCID counts as ahead.
    """
    ours = score(group["lucid"])
    theirs = {group[key].arm.label: score(group[key]) for key in RIVALS if key in group}
    ahead = all(outcome(ours, other) == "ahead" for other in theirs.values())
    return ahead, explain_against("LUCID", ours, theirs) if theirs else ""


def accuracy_table(title: str, group: Group, length: int, note: str = "") -> Table:
    """A row for every arm; columns for its steps and for every number of keys."""
    ns = next(iter(group.values())).arm.toy.test_n
    rows = [
        [trained.arm.label, trained.arm.toy.steps, *(trained.accuracy(n, length) for n in ns)]
        for trained in group.values()
    ]
    return table(title, ["", "steps", *(f"n = {n}" for n in ns)], rows, note=note)


def accuracy_bars(title: str, group: Group, length: int) -> Figure:
    """A group of bars for every number of keys."""
    groups = {}
    for n in next(iter(group.values())).arm.toy.test_n:
        groups[f"n = {n}"] = [bar(one.arm.label, one.arm.role, one.accuracy(n, length)) for one in group.values()]
    return bars(title, "accuracy, %", groups, range=(0, 100))


def length_lines(title: str, group: Group, n: int, note: str = "") -> Figure:
    """Accuracy against length, a line for every arm. Changed arms are dashed."""
    drawn = []
    for trained in group.values():
        lengths = trained.arm.toy.test_lengths
        scores = [trained.accuracy(n, length) for length in lengths]
        drawn.append(series(trained.arm.label, trained.arm.role, lengths, scores, dashed=bool(trained.arm.change)))
    trained_at = [(float(next(iter(group.values())).arm.toy.length), "length of training")]
    return lines(title, "tokens", "accuracy, %", drawn, log="x", range=(0, 100), marks=trained_at, note=note)


def accuracy_maps(title: str, group: Group, rows: str, note: str = "") -> Figure:
    """Numbers of keys against lengths, a map for every arm."""
    panels = {}
    for trained in group.values():
        ns, lengths = trained.arm.toy.test_n, trained.arm.toy.test_lengths
        values = [[trained.accuracy(n, length).mean for length in lengths] for n in ns]
        panels[trained.arm.label] = (ns, lengths, values)
    return heatmaps(title, rows, "length", panels, range=(0, 100), unit="%", note=note)


def learning_curves(title: str, group: Group, y: str = "loss, nats per answer", note: str = "") -> Figure:
    """The training loss against steps, over seeds. Changed arms are dashed."""
    drawn = []
    for trained in group.values():
        steps, losses = trained.curve()
        drawn.append(series(trained.arm.label, trained.arm.role, steps, losses, dashed=bool(trained.arm.change)))
    return lines(title, "training step", y, drawn, note=note)
