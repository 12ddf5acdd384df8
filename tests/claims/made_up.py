"""A lab whose results are made up: claims are judged by numbers that a test chooses."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lucid_lab.toys.lab import Function, Lab, Record, Scale
from lucid_lab.toys.training import Toy

Rule = Callable[[str, Any], Record]


class MadeUpLab(Lab):
    """rule: (name of the function, settings) -> record. calls: all that were asked for, in order."""

    def __init__(self, scale: Scale, rule: Rule) -> None:
        super().__init__(scale, Path("nowhere"), processes=1)
        self.rule = rule
        self.calls: list[tuple[str, Any]] = []

    def map(self, function: Function, settings: Sequence[Any], *, title: str = "", alone: bool = False) -> list[Record]:
        """The made-up records. Their folders are the numbers of the calls."""
        records = []
        for item in settings:
            records.append({**self.rule(function.__name__, item), "folder": str(len(self.calls))})
            self.calls.append((function.__name__, item))
        return records

    @property
    def toys(self) -> list[Toy]:
        """The toys that were trained."""
        return [item for name, item in self.calls if name == "train"]


def trained(toy: Toy, accuracy: float, loss: float | None = 1.0, seconds: float = 1.0) -> Record:
    """A record of `train`."""
    tests = [
        {"n": n, "length": length, "accuracy": accuracy, "loss": loss}
        for length in toy.test_lengths
        for n in toy.test_n
    ]
    curve = {"step": [1, toy.steps], "loss": [3.0, loss]}
    return {"curve": curve, "tests": tests, "seconds": seconds, "parameters": 1}


def timed(ratio: float = 1.25) -> Record:
    """A record of `time_steps`."""
    return {"milliseconds": [ratio, 1.0], "ratio": ratio}


def accuracies(accuracy: Callable[[Toy], float]) -> Rule:
    """The rule of claims that only train and time toys. LUCID takes three times the processor time of the others."""

    def rule(name: str, item: Any) -> Record:
        if name == "time_steps":
            return timed()
        return trained(item, accuracy(item), seconds=3.0 if item.attention == "lucid" else 1.0)

    return rule
