"""Compute ablation (A.5): more steps do not close the gap.

Here: the tasks of `memory_update` (overwrites) and `needle_grid` (needles), with 10 % more steps and twice the steps.
"""

from collections.abc import Sequence

from ..toys.arms import Arm, Change, arm, train_arms
from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, bar, bars, table
from ..toys.training import Toy
from . import memory_update, needle_grid

CLAIM = Claim(
    title="More steps do not close the gap",
    section="A.5",
    says="Standard attention trained for 10 % more steps, which is more than LUCID's extra compute, stays far behind "
    "LUCID.",
    paper="MNIAH at 16K: standard 0.040, with 10 % more steps 0.060, LUCID 0.140",
)
# Points: a smaller difference between LUCID and softmax attention is no gap.
GAP = 1.0
TOYS = {
    "overwrites, RoPE": memory_update.TOY,
    "overwrites, MLP, head of 64": memory_update.WITH_MLP,
    "needles, heads of 16": needle_grid.TOY,
    "needles, as models are built": needle_grid.USUAL,
}
TINY = {"steps": 10, "batch": 2, "test_batch": 2, "test_lengths": (64,)}


def judge(gaps: Sequence[tuple[float, float]]) -> str:
    """The verdict. gaps: for every task, LUCID's lead at equal steps and over softmax with 10 % more steps, in points.

    The gap of a task stays open if more than half of it is left.
    """
    stays_open = [left > gap / 2 for gap, left in gaps if gap > GAP]
    if len(stays_open) == len(gaps) and all(stays_open):
        return "holds"
    return "partly" if any(stays_open) else "does not hold"


def arms(toy: Toy) -> list[Arm]:
    """LUCID, and softmax attention with more and more steps."""
    softmax = toy.but(attention="softmax")
    more = Change("more", "+10 % steps", {"steps": round(toy.steps * 1.1)})
    twice = Change("twice", "twice the steps", {"steps": toy.steps * 2})
    return [arm(toy), arm(softmax), arm(softmax, more, "control"), arm(softmax, twice, "control")]


def run(lab: Lab) -> Conclusion:
    """The part of the gap that is left with 10 % more steps."""
    toys = {title: toy.but(**TINY) for title, toy in list(TOYS.items())[:2]} if lab.tiny else TOYS
    groups = train_arms(lab, {title: arms(toy) for title, toy in toys.items()})
    means = {
        title: {key: one.mean_accuracy(one.arm.toy.length) for key, one in group.items()}
        for title, group in groups.items()
    }
    gaps = {
        title: tuple(scores["lucid"].mean - scores[key].mean for key in ("softmax", "softmax+more"))
        for title, scores in means.items()
    }
    by_task = "; ".join(f"{title}: {left:.1f} of {gap:.1f} points" for title, (gap, left) in gaps.items())
    ours = ", ".join(f"{left:.1f} of {gap:.1f}" for gap, left in gaps.values())
    labels = [member.label for member in arms(TOYS["overwrites, RoPE"])]
    drawn = {
        title: [bar(one.arm.label, one.arm.role, means[title][key]) for key, one in group.items()]
        for title, group in groups.items()
    }
    return Conclusion(
        ours=f"left of the gap with 10 % more steps: {ours} points",
        verdict=judge([(gap, left) for gap, left in gaps.values()]),
        because=f"Left of the gap with 10 % more steps: {by_task}. Where there is none, there is nothing to close.",
        seeds=len(lab.seeds),
        figures=[bars("Mean accuracy at the length of training", "accuracy, %", drawn, range=(0, 100))],
        tables=[table("Accuracy %", ["", *labels], [[title, *scores.values()] for title, scores in means.items()])],
    )
