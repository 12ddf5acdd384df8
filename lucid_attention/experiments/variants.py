"""Variants of LUCID (A.5, ablation table): how the exponential is kept small, and learned β.

The paper, multi-needle accuracy at 2048 tokens with 2, 4, 6, 8, 10 needles: key norm 76.6, 55.8, 43.6, 33.8, 25.2;
QK norm 75.4, 51.4, 37.2, 32.0, 20.4; max norm 74.2, 48.8, 37.2, 31.4, 19.6; learned β 73.8, 48.0, 36.8, 31.8, 26.8.
"We did not find performance gains from learning β."

Here: the recall of needles of `needle_grid`, and the loss of a character model. Sharpness is ours, not the paper's.
"""

from collections.abc import Sequence
from typing import Any

from . import needle_grid
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Spread, bar, bars, spread, table
from .engine.steps import Step, evaluate, train
from .engine.study import Done
from .language_model.runs import BASE
from .small.contestants import Contestant, accuracy, accuracy_bars, mean_accuracy, reached, training
from .small.training import SmallRun

CLAIM = Claim(
    title="Key norm is the best variant",
    section="A.5",
    says="Of the ways to keep the exponential small, normalised keys find the most needles; learning β brings nothing.",
    paper="mean over 2 to 10 needles: key norm 47.0, QK norm 43.3, max norm 42.2, learned β 43.4 %",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "key norm (the default)": {},
    "QK norm": {"norm": "qk"},
    "row maximum": {"norm": "row_max"},
    "learned β": {"learn_beta": True},
    "sharpness 2": {"sharpness": 2.0},
    "sharpness 8": {"sharpness": 8.0},
    "learned sharpness": {"learn_sharpness": True},
}
THE_PAPERS = ("QK norm", "row maximum", "learned β")
PAPER = {"key norm (the default)": 47.0, "QK norm": 43.28, "row maximum": 42.24, "learned β": 43.44}
# Points above softmax attention, below which nothing was learned that variants could differ in.
LEARNED = 10.0
TEXT = BASE.but(steps=200)


def settings(scale: str) -> tuple[SmallRun, SmallRun, Sequence[int]]:
    """The run with needles, the one with text, and the seeds."""
    if scale == "smoke":
        small = {"steps": 2, "batch": 2, "test_batch": 2}
        return needle_grid.RUN.but(**small, test_lengths=(64,)), TEXT.but(**small), (0,)
    return needle_grid.RUN, TEXT, (0, 1, 2)


def contestants(scale: str) -> tuple[list[Contestant], list[Contestant]]:
    """With needles and with text."""
    needles, text, _ = settings(scale)
    both = [
        [Contestant(name, "lucid", run.but(options=options)) for name, options in VARIANTS.items()]
        + [Contestant("softmax", "softmax", run.but(attention="softmax"))]
        for run in (needles, text)
    ]
    return both[0], both[1]


def plan(scale: str, done: Done) -> list[Job]:
    """Every variant, and softmax, on both."""
    seeds = settings(scale)[2]
    return [job for group in contestants(scale) for job in training(group, seeds)]


def conclude(scale: str, done: Done) -> Conclusion:
    """Is one of the paper's other variants better than the default?"""
    needles, text, seeds = settings(scale)
    recall, reading = contestants(scale)
    found = {each.name: mean_accuracy(done, each, seeds, needles.length) for each in recall}
    losses = {each.name: _loss(done, each, seeds) for each in reading}
    default = next(iter(VARIANTS))
    better = [name for name in THE_PAPERS if _clearly(found[name], found[default])]
    level = [name for name in THE_PAPERS if name not in better and not _clearly(found[default], found[name])]
    verdict = "does not hold" if better else "partly" if level else "holds"
    learned = max(found[name].mean for name in (default, *THE_PAPERS)) - found["softmax"].mean >= LEARNED
    rest = ", ".join(f"{name} {found[name]}" for name in THE_PAPERS)
    ours = f"mean over needles: key norm {found[default]}, {rest} %"
    said = f"Better than key norm: {', '.join(better)}. " if better else ""
    said += f"Not told apart from it: {', '.join(level)}. " if level else ""
    rows = [[name, found[name], losses[name], PAPER.get(name)] for name in found]
    return Conclusion(
        ours=ours,
        verdict="too small to judge" if scale == "smoke" or not learned else verdict,
        because=f"{ours}. {said}Loss of a character model: " + ", ".join(f"{k} {v}" for k, v in losses.items()) + ".",
        seeds=len(seeds),
        figures=[
            accuracy_bars(f"Recall of needles after {needles.steps} steps", done, recall, seeds, needles.length),
            bars(
                f"Character model after {text.steps} steps",
                "validation loss, nats",
                {"": [bar(each.name, each.role, losses[each.name]) for each in reading]},
            ),
        ],
        tables=[
            table(
                "Variants",
                ["", "needles, %", "text, nats", "paper, mean over 2 to 10 needles, %"],
                rows,
                note="Row maximum is our reading of the paper's max norm: a global maximum would not be causal.",
            ),
            table(
                "Needles, accuracy %",
                ["", *(f"n = {n}" for n in needles.test_n)],
                [[e.name, *(accuracy(done, e, seeds, n, needles.length) for n in needles.test_n)] for e in recall],
            ),
        ],
    )


def _loss(done: Done, contestant: Contestant, seeds: Sequence[int]) -> Spread:
    run = contestant.run
    return spread((reached(done, contestant, seed, run.test_n[0], run.length, "loss") for seed in seeds), 3)


def _clearly(one: Spread, other: Spread) -> bool:
    """Whether one is above another by more than their spreads."""
    return one.mean - other.mean > (one.std**2 + other.std**2) ** 0.5


def paper() -> list[Step]:
    """Pretrain each variant, and ask for 2 to 10 needles at 2048 tokens."""
    steps = []
    options = {"key": "{}", "qk": '{"norm":"qk"}', "row_max": '{"norm":"row_max"}', "beta": '{"learn_beta":true}'}
    for name, chosen in options.items():
        out = f"runs/paper/variants-{name}"
        steps.append(train("pretrain_2k", "lucid", "--set", f"attention_options={chosen}", out=out))
        asked = ("--needles", "2,4,6,8,10", "--lengths", "2048", "--samples", "500")
        steps.append(evaluate(f"{out}/model", "mniah", f"results/paper/variants-{name}", *asked))
    return steps
