"""LUCID beside softmax attention on a task of text: which runs there are, and how they are judged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..engine.jobs import Job, Record
from ..engine.result import Figure, Spread, lines, series, spread
from .training import TextRun

Done = Mapping[Job, Record]
Cell = Mapping[str, Any]

SMOKE = ("too small to judge", "A smoke test: it shows that the parts fit, and nothing else.")

LOSS = "loss of unseen answers"


class Arm(NamedTuple):
    """role: of its colour."""

    attention: str
    name: str
    role: str


# Softmax attention with the time that LUCID takes.
LONGER = "softmax_longer"
ARMS = {
    "softmax": Arm("softmax", "softmax", "softmax"),
    "lucid": Arm("lucid", "LUCID", "lucid"),
    LONGER: Arm("softmax", "softmax, equal time", "control"),
}


@dataclass(frozen=True)
class Comparison:
    """base: what all runs have in common. seeds: of every arm. milliseconds: a step of softmax, of LUCID, about.

    equal_time: softmax attention is also trained for as long as LUCID takes.
    """

    base: TextRun
    seeds: int
    milliseconds: tuple[float, float]
    equal_time: bool = True

    @property
    def arms(self) -> list[str]:
        """In the order of tables and figures."""
        return [arm for arm in ARMS if self.equal_time or arm != LONGER]

    def runs(self, arm: str, done: Done) -> list[TextRun]:
        """One a seed; of LONGER once it is known how long LUCID takes."""
        base = self.base.but(attention=ARMS[arm].attention)
        if arm == LONGER:
            base = base.but(steps=round(self.base.steps * self.time_ratio(done)))
        return [base.but(seed=seed) for seed in range(self.seeds)]

    def jobs(self, arm: str, done: Done) -> list[Job]:
        """Of the runs of an arm."""
        each = self.milliseconds[ARMS[arm].attention == "lucid"]
        return [run.job(f"{ARMS[arm].name}, seed {run.seed}", each) for run in self.runs(arm, done)]

    def time_ratio(self, done: Done) -> float:
        """How many times as long LUCID takes for a step, measured in the runs; at least 1."""
        speed = {
            arm: spread(done[job]["tokens_per_second"] for job in self.jobs(arm, done)).mean
            for arm in ("softmax", "lucid")
        }
        return max(1.0, round(speed["softmax"] / speed["lucid"], 2))

    def time_note(self, done: Done) -> str:
        """What stands beside numbers at equal time."""
        if not self.equal_time:
            return ""
        return (
            f"A step of LUCID took {self.time_ratio(done):.2f} times as long, which is what equal time gives softmax."
        )

    def plan(self, done: Done) -> list[Job]:
        """Texts; then both attentions with equal steps; then softmax attention with equal time."""
        wanted = [self.base.texts_job()]
        if wanted[0] not in done:
            return wanted
        pairs = zip(self.jobs("lucid", done), self.jobs("softmax", done), strict=True)
        wanted += [job for pair in pairs for job in pair]
        if self.equal_time and all(job in done for job in wanted):
            wanted += self.jobs(LONGER, done)
        return wanted

    def score(self, done: Done, arm: str, metric: str, where: Callable[[Cell], bool] = lambda _: True) -> Spread:
        """Mean of a metric over the cells that are meant, with the deviation between seeds."""
        values = []
        for job in self.jobs(arm, done):
            cells = [cell["scores"][metric] for cell in done[job]["cells"] if where(cell) and metric in cell["scores"]]
            values.append(sum(cells) / len(cells))
        return spread(values)

    def loss(self, done: Done, arm: str) -> Spread:
        """Of answers to prompts that were kept from training, nats per token: it moves before any answer is right."""
        return spread((done[job]["validation_loss"] for job in self.jobs(arm, done)), 3)

    def learning_curves(self, done: Done, what: str) -> Figure:
        """The loss while training, mean over seeds."""
        drawn = []
        for arm in self.arms:
            curves = [done[job]["curve"] for job in self.jobs(arm, done)]
            by_step = [spread(losses, 3) for losses in zip(*(curve["loss"] for curve in curves), strict=True)]
            drawn.append(
                series(
                    ARMS[arm].name,
                    ARMS[arm].role,
                    curves[0]["step"],
                    [each.mean for each in by_step],
                    spread=[each.std for each in by_step] if self.seeds > 1 else None,
                    dashed=arm == LONGER,
                )
            )
        return lines(
            f"Learning {what}",
            "step",
            "loss of the answers, nats per token",
            drawn,
            note="Mean over seeds, on prompts that are never seen twice in a pass.",
        )


def percent(score: Spread) -> Spread:
    """A share of one as percent."""
    return Spread(100 * score.mean, 100 * score.std, score.count, score.digits)


def clearly_above(one: Spread, other: Spread) -> bool:
    """By more than the deviations of both together."""
    return one.mean - other.mean > one.std + other.std


def judged(
    scores: Mapping[str, Spread], *, floor: float, ceiling: float, what: str, unit: str = " %"
) -> tuple[str, str]:
    """A verdict and its reason. scores: of "lucid", "softmax" and, if it ran, LONGER; more is better.

    floor: what counts as nothing learned. ceiling: above it nothing is left to be better at.
    """
    lucid, softmax, longer = scores["lucid"], scores["softmax"], scores.get(LONGER, scores["softmax"])
    said = f"{what}: LUCID {lucid}{unit}, softmax {softmax}{unit} at equal steps and {longer}{unit} at equal time"
    if max(lucid.mean, softmax.mean, longer.mean) <= floor:
        return "too small to judge", f"{said}; none has learned the task in the minutes that a run has here."
    if min(lucid.mean, softmax.mean) >= ceiling:
        return "too small to judge", f"{said}; both solve the task at this size, so it tells nothing apart."
    if clearly_above(lucid, longer) and clearly_above(lucid, softmax):
        return "holds", f"{said}; the difference is larger than the deviations between seeds."
    if clearly_above(lucid, softmax):
        return "partly", f"{said}; ahead at equal steps, not clearly at equal time."
    if clearly_above(longer, lucid) or clearly_above(softmax, lucid):
        return "does not hold", f"{said}; softmax attention is ahead here."
    return "does not hold", f"{said}; no difference beyond the deviations between seeds."
