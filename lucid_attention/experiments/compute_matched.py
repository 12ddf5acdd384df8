"""Compute ablation (A.5): more steps do not close the gap.

The paper: standard attention trained for 10 % more steps; SNIAH at 4096, 8192, 16384 tokens: 0.475, 0.193, 0.020
becomes 0.467, 0.193, 0.020, and LUCID has 0.686, 0.502, 0.150; MNIAH at 8192, 16384, 32768: 0.232, 0.040, 0.040
becomes 0.234, 0.060, 0.040, and LUCID has 0.332, 0.140, 0.120.

Here on both small tasks, with 10 % more steps, and with twice as many.
"""

from collections.abc import Sequence

from . import memory_update, needle_grid
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, bar, bars, table
from .engine.steps import Step, evaluate, train, tune
from .engine.study import Done
from .small.contestants import Contestant, mean_accuracy, training
from .small.training import SmallRun

CLAIM = Claim(
    title="More steps do not close the gap",
    section="A.5",
    says="Standard attention trained for 10 % more steps, which is more than LUCID's extra compute, stays far behind "
    "LUCID.",
    paper="MNIAH at 16K: standard 0.040, with 10 % more steps 0.060, LUCID 0.140",
)
MORE = {"softmax": 1.0, "softmax, +10 % steps": 1.1, "softmax, twice the steps": 2.0}


def settings(scale: str) -> tuple[dict[str, SmallRun], Sequence[int]]:
    """The tasks and the seeds."""
    runs = {
        "memory update, RoPE": memory_update.RUN,
        "memory update, MLP, head of 64": memory_update.WITH_MLP,
        "needles, heads of 16": needle_grid.RUN,
        "needles, as models are built": needle_grid.USUAL,
    }
    if scale == "smoke":
        small = {"steps": 10, "batch": 2, "test_batch": 2, "test_lengths": (64,)}
        return {name: run.but(**small) for name, run in list(runs.items())[:2]}, (0,)
    return runs, (0, 1, 2)


def contestants(run: SmallRun) -> list[Contestant]:
    """LUCID, and softmax with more and more steps."""
    base = run.but(attention="softmax")
    softmax = [
        Contestant(name, "softmax" if more == 1 else "control", base.but(steps=round(run.steps * more)))
        for name, more in MORE.items()
    ]
    return [Contestant("LUCID", "lucid", run), *softmax]


def plan(scale: str, done: Done) -> list[Job]:
    """All tasks, all lengths of training. Most are jobs of `memory_update` and `needle_grid`."""
    runs, seeds = settings(scale)
    return [job for run in runs.values() for job in training(contestants(run), seeds)]


def conclude(scale: str, done: Done) -> Conclusion:
    """How much of the gap is left with 10 % more steps."""
    runs, seeds = settings(scale)
    groups, rows, stays = {}, [], []
    for task, run in runs.items():
        reached = {each.name: mean_accuracy(done, each, seeds, run.length) for each in contestants(run)}
        roles = {each.name: each.role for each in contestants(run)}
        groups[task] = [bar(name, roles[name], value) for name, value in reached.items()]
        rows.append([task, *reached.values()])
        gap = reached["LUCID"].mean - reached["softmax"].mean
        left = reached["LUCID"].mean - reached["softmax, +10 % steps"].mean
        stays.append((task, gap, left))
    gaps = [(gap, left) for _, gap, left in stays if gap > 1]
    kept = [left > gap / 2 for gap, left in gaps]
    verdict = "holds" if len(gaps) == len(stays) and all(kept) else "partly" if any(kept) else "does not hold"
    told = "; ".join(f"{task}: {left:.1f} of {gap:.1f} points" for task, gap, left in stays)
    ours = "left of the gap with 10 % more steps: " + ", ".join(f"{left:.1f} of {gap:.1f}" for _, gap, left in stays)
    return Conclusion(
        ours=f"{ours} points",
        verdict="too small to judge" if scale == "smoke" else verdict,
        because=f"Left of the gap with 10 % more steps: {told}. Where there is none, there is nothing to close.",
        seeds=len(seeds),
        figures=[bars("Mean accuracy at the length of training", "accuracy, %", groups, range=(0, 100))],
        tables=[table("Accuracy %", ["", "LUCID", *MORE], rows)],
    )


def paper() -> list[Step]:
    """Tune at 64K for 500 steps, and standard attention for 550."""
    steps = []
    for name, count in (("softmax", 500), ("softmax_more", 550), ("lucid", 500)):
        attention = name.removesuffix("_more")
        if name == attention:
            steps.append(train("pretrain_2k", attention))
        out = f"runs/paper/compute-{name}"
        start = f"runs/paper/pretrain_2k-{attention}/model"
        steps.append(tune("finetune_64k", start, out, "--set", f"steps={count}", "--parallel", "fsdp"))
        asked = ("--needles", "4", "--lengths", "4096,8192,16384,32768", "--samples", "500")
        steps.append(evaluate(f"{out}/model", "sniah,mniah", f"results/paper/compute-{name}", *asked))
    return steps
