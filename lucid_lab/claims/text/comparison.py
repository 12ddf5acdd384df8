"""LUCID beside softmax attention on a task of text: the runs and the verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..engine.jobs import Job
from ..engine.result import Figure, Spread, lines, series, spread
from ..engine.study import Done
from .training import TextRun

Cell = Mapping[str, Any]

LOSS = "loss of unseen answers"


class Arm(NamedTuple):
    """One side of a comparison. role: its colour."""

    attention: str
    title: str
    role: str


# Softmax attention with the training time of LUCID.
EQUAL_TIME = "softmax+equal_time"
ARMS = {
    "softmax": Arm("softmax", "softmax", "softmax"),
    "lucid": Arm("lucid", "LUCID", "lucid"),
    EQUAL_TIME: Arm("softmax", "softmax, equal time", "control"),
}


@dataclass(frozen=True)
class Comparison:
    """The runs of all arms.

    base: the settings that all runs share. seeds: of every arm.
    milliseconds: about the time of a step, of softmax and of LUCID.
    equal_time: softmax attention is also trained for as long as LUCID takes.
    """

    base: TextRun
    seeds: tuple[int, ...]
    milliseconds: tuple[float, float]
    equal_time: bool = True

    @property
    def arms(self) -> list[str]:
        """In the order of tables and figures."""
        return [arm for arm in ARMS if self.equal_time or arm != EQUAL_TIME]

    def runs(self, arm: str, done: Done) -> list[TextRun]:
        """The runs of an arm, one for every seed. EQUAL_TIME needs the records of the other arms."""
        base = self.base.but(attention=ARMS[arm].attention)
        if arm == EQUAL_TIME:
            base = base.but(steps=round(self.base.steps * self.time_ratio(done)))
        return [base.but(seed=seed) for seed in self.seeds]

    def jobs(self, arm: str, done: Done) -> list[Job]:
        """The training of the runs of an arm."""
        milliseconds = self.milliseconds[ARMS[arm].attention == "lucid"]
        return [run.job(f"{ARMS[arm].title}, seed {run.seed}", milliseconds) for run in self.runs(arm, done)]

    def time_ratio(self, done: Done) -> float:
        """The time of a step of LUCID over that of softmax attention, measured in the runs; at least 1."""
        speed = {
            arm: spread(done[job]["tokens_per_second"] for job in self.jobs(arm, done)).mean
            for arm in ("softmax", "lucid")
        }
        return max(1.0, round(speed["softmax"] / speed["lucid"], 2))

    def time_note(self, done: Done) -> str:
        """A note on equal time for a table."""
        if not self.equal_time:
            return ""
        return (
            f"A step of LUCID took {self.time_ratio(done):.2f} times as long, which is what equal time gives softmax."
        )

    def plan(self, done: Done) -> list[Job]:
        """Texts; then both attentions with equal steps; then softmax attention with equal time."""
        jobs = [self.base.texts_job()]
        if jobs[0] not in done:
            return jobs
        pairs = zip(self.jobs("lucid", done), self.jobs("softmax", done), strict=True)
        jobs += [job for pair in pairs for job in pair]
        if self.equal_time and all(job in done for job in jobs):
            jobs += self.jobs(EQUAL_TIME, done)
        return jobs

    def score(self, done: Done, arm: str, metric: str, where: Callable[[Cell], bool] = lambda _: True) -> Spread:
        """Mean of a metric over the cells that `where` selects, over seeds."""
        values = []
        for job in self.jobs(arm, done):
            cells = [cell["scores"][metric] for cell in done[job]["cells"] if where(cell) and metric in cell["scores"]]
            values.append(sum(cells) / len(cells))
        return spread(values)

    def loss(self, done: Done, arm: str) -> Spread:
        """The loss of answers to unseen prompts, nats per token, over seeds. Loss falls before any answer is right."""
        return spread((done[job]["validation_loss"] for job in self.jobs(arm, done)), 3)

    def learning_curves(self, done: Done, what: str) -> Figure:
        """The training loss against steps. what: the task, as in "Learning to find needles"."""
        arm_curves = []
        for arm in self.arms:
            curves = [done[job]["curve"] for job in self.jobs(arm, done)]
            by_step = [spread(losses, 3) for losses in zip(*(curve["loss"] for curve in curves), strict=True)]
            arm_curves.append(
                series(
                    ARMS[arm].title,
                    ARMS[arm].role,
                    curves[0]["step"],
                    [loss.mean for loss in by_step],
                    spread=[loss.std for loss in by_step] if len(self.seeds) > 1 else None,
                    dashed=arm == EQUAL_TIME,
                )
            )
        return lines(
            f"Learning {what}",
            "step",
            "loss of the answers, nats per token",
            arm_curves,
            note="Mean over seeds, on prompts that are never seen twice in a pass.",
        )


def percent(score: Spread) -> Spread:
    """A share as percent."""
    return Spread(100 * score.mean, 100 * score.std, score.count, score.digits)


def clearly_above(one: Spread, other: Spread) -> bool:
    """Whether the difference of the means is larger than the deviations of both together."""
    return one.mean - other.mean > one.std + other.std


def judge(
    scores: Mapping[str, Spread], *, floor: float, ceiling: float, what: str, unit: str = " %"
) -> tuple[str, str]:
    """The verdict and its reason. scores: by arm, EQUAL_TIME only if it ran; more is better.

    LUCID must be clearly above softmax attention at equal steps and at equal time.
    floor: up to this score, nothing was learned. ceiling: from this score on, the task is solved.
    what, unit: of the scores, for the reason.
    """
    lucid, softmax, longer = scores["lucid"], scores["softmax"], scores.get(EQUAL_TIME, scores["softmax"])
    numbers = f"{what}: LUCID {lucid}{unit}, softmax {softmax}{unit} at equal steps and {longer}{unit} at equal time"
    if max(lucid.mean, softmax.mean, longer.mean) <= floor:
        return "too small to judge", f"{numbers}; none has learned the task in the minutes that a run has here."
    if min(lucid.mean, softmax.mean) >= ceiling:
        return "too small to judge", f"{numbers}; both solve the task at this size, so it tells nothing apart."
    if clearly_above(lucid, longer) and clearly_above(lucid, softmax):
        return "holds", f"{numbers}; the difference is larger than the deviations between seeds."
    if clearly_above(lucid, softmax):
        return "partly", f"{numbers}; ahead at equal steps, not clearly at equal time."
    if clearly_above(longer, lucid) or clearly_above(softmax, lucid):
        return "does not hold", f"{numbers}; softmax attention is ahead here."
    return "does not hold", f"{numbers}; no difference beyond the deviations between seeds."
