"""Compute ablation (A.5): more steps do not close the gap.

The paper: standard attention trained for 10 % more steps; SNIAH at 4096, 8192, 16384 tokens: 0.475, 0.193, 0.020
becomes 0.467, 0.193, 0.020, and LUCID has 0.686, 0.502, 0.150; MNIAH at 8192, 16384, 32768: 0.232, 0.040, 0.040
becomes 0.234, 0.060, 0.040, and LUCID has 0.332, 0.140, 0.120.

Here: the tasks of `memory_update` (overwrites) and `needle_grid` (needles), with 10 % more steps and twice the steps.
"""

from collections.abc import Sequence

from . import memory_update, needle_grid, needle_lm
from .engine.full_scale import cell_text
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, bar, bars, table
from .engine.scale import Scale
from .engine.steps import Step, tune, unique
from .engine.study import Done
from .engine.verdict import Measured, PaperNumber, Place, Verdict, judge_leads, lead
from .small.contestants import Change, Contestant, contestant, mean_accuracy, training
from .small.training import SmallRun

CLAIM = Claim(
    title="More steps do not close the gap",
    section="A.5",
    says="Standard attention trained for 10 % more steps, which is more than LUCID's extra compute, stays far behind "
    "LUCID.",
    paper="MNIAH at 16K: standard 0.040, with 10 % more steps 0.060, LUCID 0.140",
)
# Points: a smaller difference between LUCID and softmax attention is no gap.
GAP = 1.0
# Table 7 in percent: task, length, standard, standard with 10 % more steps, LUCID.
ROWS = (
    ("S-NIAH", 4096, 47.5, 46.7, 68.6),
    ("S-NIAH", 8192, 19.3, 19.3, 50.2),
    ("S-NIAH", 16_384, 2.0, 2.0, 15.0),
    ("M-NIAH", 8192, 23.2, 23.4, 33.2),
    ("M-NIAH", 16_384, 4.0, 6.0, 14.0),
    ("M-NIAH", 32_768, 4.0, 4.0, 12.0),
)
MODELS = {
    "Standard": "needles_64k-softmax",
    "Standard (+10 %)": "needles_64k_more-softmax",
    "LUCID": "needles_64k-lucid",
}
TABLE = {
    model: [
        PaperNumber(
            "Table 7",
            f"{task}, {model}, {length} tokens",
            values[column],
            Place(record, needle_lm.TASKS[task], cell_text(length=length)),
        )
        for task, length, *values in ROWS
    ]
    for column, (model, record) in enumerate(MODELS.items())
}
PAPER_NUMBERS = tuple(number for column in TABLE.values() for number in column)


def judge_paper(measured: Measured) -> Verdict:
    """LUCID stays ahead of standard attention with 10 % more steps, and these close less than half of its lead."""
    standard, more, lucid = TABLE.values()
    gap = lead("LUCID − Standard", lucid, standard, measured)
    left = lead("LUCID − Standard with 10 % more steps", lucid, more, measured)
    return judge_leads([left], [gap], {"10 % more steps close less than half of the gap": left.ours > gap.ours / 2})


def judge(gaps: Sequence[tuple[float, float]]) -> str:
    """The verdict. gaps: for every task, LUCID's lead at equal steps and over softmax with 10 % more steps, in points.

    The gap of a task stays open if more than half of it is left.
    """
    stays_open = [left > gap / 2 for gap, left in gaps if gap > GAP]
    if len(stays_open) == len(gaps) and all(stays_open):
        return "holds"
    return "partly" if any(stays_open) else "does not hold"


def runs(scale: Scale) -> dict[str, SmallRun]:
    """The runs by title."""
    runs_by_title = {
        "overwrites, RoPE": memory_update.RUN,
        "overwrites, MLP, head of 64": memory_update.WITH_MLP,
        "needles, heads of 16": needle_grid.RUN,
        "needles, as models are built": needle_grid.USUAL,
    }
    if scale.tiny:
        small = {"steps": 10, "batch": 2, "test_batch": 2, "test_lengths": (64,)}
        return {title: run.but(**small) for title, run in list(runs_by_title.items())[:2]}
    return runs_by_title


def contestants(run: SmallRun) -> list[Contestant]:
    """LUCID, and softmax attention with more and more steps."""
    softmax = run.but(attention="softmax")
    more = Change("more", "+10 % steps", {"steps": round(run.steps * 1.1)})
    twice = Change("twice", "twice the steps", {"steps": round(run.steps * 2.0)})
    return [
        contestant(run),
        contestant(softmax),
        contestant(softmax, more, "control"),
        contestant(softmax, twice, "control"),
    ]


def plan(scale: Scale, done: Done) -> list[Job]:
    """All tasks, all numbers of steps. Most are jobs of `memory_update` and `needle_grid`."""
    return [job for run in runs(scale).values() for job in training(contestants(run), scale.seeds)]


def conclude(scale: Scale, done: Done) -> Conclusion:
    """The part of the gap that is left with 10 % more steps."""
    groups, rows, gaps = {}, [], {}
    labels: list[str] = []
    for title, run in runs(scale).items():
        members = contestants(run)
        labels = [member.label for member in members]
        means = {member.key: mean_accuracy(done, member, scale.seeds, run.length) for member in members}
        groups[title] = [bar(member.label, member.role, means[member.key]) for member in members]
        rows.append([title, *means.values()])
        lucid = means["lucid"].mean
        gaps[title] = (lucid - means["softmax"].mean, lucid - means["softmax+more"].mean)
    by_task = "; ".join(f"{title}: {left:.1f} of {gap:.1f} points" for title, (gap, left) in gaps.items())
    ours = ", ".join(f"{left:.1f} of {gap:.1f}" for gap, left in gaps.values())
    return Conclusion(
        ours=f"left of the gap with 10 % more steps: {ours} points",
        verdict=judge(list(gaps.values())),
        because=f"Left of the gap with 10 % more steps: {by_task}. Where there is none, there is nothing to close.",
        seeds=len(scale.seeds),
        figures=[bars("Mean accuracy at the length of training", "accuracy, %", groups, range=(0, 100))],
        tables=[table("Accuracy %", ["", *labels], rows)],
    )


def paper() -> list[Step]:
    """The models and needles of `needle_lm`, tuned at 64K for 500 steps, and standard attention tuned for 550."""
    more = "runs/paper/finetune_64k_more-softmax"
    start = "runs/paper/pretrain_2k-softmax/model"
    steps = [
        *needle_lm.tuned_64k("softmax"),
        tune("finetune_64k", start, more, "--set", "steps=550"),
        needle_lm.ask_tuned(more, "needles_64k_more-softmax"),
        *needle_lm.tuned_64k("lucid"),
    ]
    return unique(steps)
