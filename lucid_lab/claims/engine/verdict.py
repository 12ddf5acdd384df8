"""Verdicts at full scale: the paper's numbers, the places of ours, and the rules that compare them.

Scores are in percent of the best score, so that every table of the paper has one scale; losses are in nats.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .result import Table, table

# A lead of LUCID holds if it is at least this share of the paper's lead, and above this many standard errors.
SHARE, ERRORS = 0.5, 2.0
RULE = f"A lead holds if it is at least {SHARE:.0%} of the paper's and above {ERRORS:g} standard errors."


class Place(NamedTuple):
    """The place of a number: the folder of its record, what is measured, and the labels of its cell, sorted."""

    record: str
    what: str
    cell: str = ""

    def __str__(self) -> str:
        return f"{self.record}: {self.what}{f' ({self.cell})' if self.cell else ''}"


class Measure(NamedTuple):
    """A number and its standard error; 0 where it is not known."""

    value: float
    error: float = 0.0


@dataclass(frozen=True)
class PaperNumber:
    """A number of the paper.

    where: table, figure or section. name: what it is the number of. place: of ours.
    value: None where the paper draws a picture without numbers. about: the paper's words, where it gives no exact
    number.
    """

    where: str
    name: str
    value: float | None
    place: Place
    about: str = ""

    @property
    def known(self) -> float:
        """The value, of a number that the paper gives."""
        assert self.value is not None, f"the paper gives no number for {self.name}"
        return self.value


class Missing(LookupError):
    """The place, or the experiment, that a record does not have."""


@dataclass(frozen=True)
class Verdict:
    """verdict: one of VERDICTS. ours: the numbers, short. because: the reason. leads: rows for the table."""

    verdict: str
    ours: str
    because: str
    leads: Sequence["Lead"] = ()


@dataclass(frozen=True)
class Measured:
    """The numbers that finished commands have written, and the verdicts of experiments among them, by name."""

    numbers: Mapping[Place, Measure]
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    def __getitem__(self, place: Place) -> Measure:
        if place not in self.numbers:
            raise Missing(str(place))
        return self.numbers[place]

    def verdict_of(self, experiment: str) -> Verdict:
        """The verdict of an experiment that is a step of the recipe."""
        if experiment not in self.verdicts:
            raise Missing(f"the result of `lucid experiment {experiment}`")
        return self.verdicts[experiment]


class Judged(Protocol):
    """What an experiment has to judge its full recipe with."""

    PAPER_NUMBERS: Sequence[PaperNumber]

    def judge_paper(self, measured: Measured) -> Verdict:
        """The verdict from the numbers of the full recipe. Missing where one is not there."""


@dataclass(frozen=True)
class Lead:
    """By how much one is ahead of another, in the paper and here. error: standard error of ours."""

    where: str
    name: str
    paper: float
    ours: float
    error: float = 0.0
    unit: str = "points"

    @property
    def clear(self) -> bool:
        """Whether ours is more than noise."""
        return self.ours > ERRORS * self.error

    @property
    def holds(self) -> bool:
        """RULE. The paper's numbers are rounded, so that an equal lead may be smaller by the last bit."""
        return self.clear and self.ours >= SHARE * self.paper - 1e-9

    def __str__(self) -> str:
        error = f" ± {self.error:.3g}" if self.error else ""
        return f"{self.name} {self.ours:+.3g}{error} (paper {self.paper:+.3g}) {self.unit}"


def lead(
    name: str,
    ahead: Sequence[PaperNumber],
    behind: Sequence[PaperNumber],
    measured: Measured,
    *,
    relative: bool = False,
) -> Lead:
    """The mean lead over pairs of numbers, in points, or relative: in percent of the number behind."""
    papers, ours = [], []
    for one, other in zip(ahead, behind, strict=True):
        papers.append(difference(Measure(one.known), Measure(other.known), relative=relative))
        ours.append(difference(measured[one.place], measured[other.place], relative=relative))
    paper_mean, our_mean = (math.fsum(found.value for found in side) / len(side) for side in (papers, ours))
    error = math.hypot(*(found.error for found in ours)) / len(ours)
    return Lead(ahead[0].where, name, paper_mean, our_mean, error, "%" if relative else "points")


def difference(one: Measure, other: Measure, *, relative: bool = False) -> Measure:
    """One minus the other. relative: in percent of the other; a gain on nothing counts as 100 %."""
    factor = 100 / (other.value or one.value or 1.0) if relative else 1.0
    return Measure(factor * (one.value - other.value), abs(factor) * math.hypot(one.error, other.error))


def judge_leads(
    main: Sequence[Lead], others: Sequence[Lead] = (), conditions: Mapping[str, bool] | None = None
) -> Verdict:
    """The verdict from leads by RULE.

    "holds": all leads hold and all conditions are true. "does not hold": no main lead is clear. Otherwise "partly".
    """
    leads, conditions = [*main, *others], conditions or {}
    weak = [lead.name for lead in leads if not lead.holds]
    untrue = [words for words, true in conditions.items() if not true]
    clear = any(lead.clear for lead in main)
    verdict = "does not hold" if not clear else "partly" if weak or untrue else "holds"
    ours = "; ".join(map(str, leads))
    because = f"{ours}. {RULE}"
    because += f" Not held: {', '.join(weak)}." if weak else ""
    because += "".join(f" {'Not so' if words in untrue else 'So'}: {words}." for words in conditions)
    return Verdict(verdict, "; ".join(map(str, main)), because, leads)


def as_at_small_scale(name: str) -> tuple[tuple[PaperNumber, ...], Callable[[Measured], Verdict]]:
    """PAPER_NUMBERS and `judge_paper` of an experiment whose full recipe is its small scale.

    That is so where the paper's own experiment is small, or where the paper gives no number.
    """
    return (), lambda measured: measured.verdict_of(name)


class Cost(NamedTuple):
    """What LUCID adds in percent, in the paper and here."""

    name: str
    paper: float
    ours: float


def judge_costs(costs: Sequence[Cost], slack: float) -> Verdict:
    """The verdict from costs, each of which may be `slack` points above the paper's."""
    above = [cost.name for cost in costs if cost.ours > cost.paper + slack]
    verdict = "holds" if not above else "partly" if len(above) < len(costs) else "does not hold"
    ours = ", ".join(f"{cost.name} {cost.ours:+.1f} %" for cost in costs)
    papers = ", ".join(f"{cost.name} {cost.paper:+.1f} %" for cost in costs)
    because = f"{ours}; the paper: {papers}. A cost holds if it is at most {slack:g} points above the paper's."
    return Verdict(verdict, ours, because + (f" Above it: {', '.join(above)}." if above else ""))


def verdict_on(experiment: Judged, measured: Measured) -> tuple[Verdict, Table]:
    """The verdict of an experiment on its full recipe, and the paper's numbers beside ours.

    A number that is missing makes it "incomplete": the reason names what is missing.
    """
    missing = [str(number.place) for number in experiment.PAPER_NUMBERS if number.place not in measured.numbers]
    verdict = None
    if not missing:
        try:
            verdict = experiment.judge_paper(measured)
        except Missing as error:
            missing = [str(error)]
    if verdict is None:
        total = max(len(missing), len(experiment.PAPER_NUMBERS))
        named = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        count = f"{total - len(missing)} of {total} numbers"
        verdict = Verdict("incomplete", f"{count} are there", f"{count} are there. Missing: {named}.")
    return verdict, _numbers_table(experiment.PAPER_NUMBERS, measured, verdict.leads)


def _numbers_table(numbers: Sequence[PaperNumber], measured: Measured, leads: Sequence[Lead]) -> Table:
    rows: list[list[object]] = []
    for number in numbers:
        mine = measured.numbers.get(number.place)
        value, error = (None, None) if mine is None else (round(mine.value, 4), round(mine.error, 4) or None)
        rows.append([number.where, number.name, number.about or number.value, value, error])
    for one in leads:
        name = f"{one.name}, {one.unit}"
        rows.append([one.where, name, round(one.paper, 4), round(one.ours, 4), round(one.error, 4) or None])
    note = "Scores are in percent of the best score, losses in nats. An empty cell has no number yet."
    return table("The paper's numbers and ours", ["in the paper", "what", "paper", "ours", "± error"], rows, note=note)
