"""Variants of LUCID (A.5, ablation table): how the exponential is kept small, and learned β.

The paper, multi-needle accuracy at 2048 tokens with 2, 4, 6, 8, 10 needles: key norm 76.6, 55.8, 43.6, 33.8, 25.2;
QK norm 75.4, 51.4, 37.2, 32.0, 20.4; max norm 74.2, 48.8, 37.2, 31.4, 19.6; learned β 73.8, 48.0, 36.8, 31.8, 26.8.
"We did not find performance gains from learning β."

Here: the needles of `needle_grid`, and the loss of a character model. The variants of sharpness are not in the paper.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..toys.arms import Arm, Group, Trained, accuracy_bars, arm, train_arms
from ..toys.lab import HOURS, Lab
from ..toys.results import Claim, Conclusion, Spread, bar, bars, spread, table
from ..toys.training import CHARACTER_MODEL, Toy
from . import needle_grid

CLAIM = Claim(
    title="Key norm is the best variant",
    section="A.5",
    says="Of the ways to keep the exponential small, normalised keys find the most needles; learning β brings nothing.",
    paper="mean over 2 to 10 needles: key norm 47.0, QK norm 43.3, max norm 42.2, learned β 43.4 %",
)


@dataclass(frozen=True)
class Variant:
    """options: of `LucidAttention`. paper: mean accuracy over 2 to 10 needles in the paper, percent."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: float | None = None


DEFAULT = "key_norm"
VARIANTS = {
    DEFAULT: Variant("key norm (the default)", paper=47.0),
    "qk_norm": Variant("QK norm", {"norm": "qk"}, 43.28),
    "row_max": Variant("row maximum", {"norm": "row_max"}, 42.24),
    "learned_beta": Variant("learned β", {"learn_beta": True}, 43.44),
    "sharpness_2": Variant("sharpness 2", {"sharpness": 2.0}),
    "sharpness_8": Variant("sharpness 8", {"sharpness": 8.0}),
    "learned_sharpness": Variant("learned sharpness", {"learn_sharpness": True}),
}
# The paper's alternatives to the default.
ALTERNATIVES = [key for key, variant in VARIANTS.items() if variant.paper is not None and key != DEFAULT]
# A variant that is less than this many points above softmax attention has not left its plateau, so nothing is known of
# how it finds needles. The best of the paper's variants must have left it. Otherwise none learned the task.
LEARNED = 10.0
# A plateau counts as not left if the run has this many times the steps in which the slowest seed of the default leaves
# it: the first at which its loss is below LEFT nats.
PATIENCE, LEFT = 2.0, 0.5
TEXT = CHARACTER_MODEL.but(steps=200)
TINY = {"steps": 2, "batch": 2, "test_batch": 2}
# The steps of `--scale hours`: three times those in which key norm leaves its plateau.
LONG_STEPS = 3000


def judge(accuracies: Mapping[str, Spread], losses: Mapping[str, Spread], patient: bool) -> str:
    """The verdict, from mean accuracies with needles and losses on text, by key.

    "does not hold": an alternative of the paper finds more needles than the default. "holds": the default is clearly
    better than each of them with needles and on text, and none may still be on its plateau. Otherwise "partly".
    patient: the runs were long enough to say that a plateau is not left.
    """
    best = max(accuracies[key].mean for key in (DEFAULT, *ALTERNATIVES))
    if not best - accuracies["softmax"].mean >= LEARNED:
        return "too small to judge"
    if better(accuracies):
        return "does not hold"
    gains = {key: Spread(-loss.mean, loss.std, loss.count) for key, loss in losses.items()}
    unsure = [*level(accuracies), *better(gains), *level(gains)]
    return "partly" if unsure or (stuck(accuracies) and not patient) else "holds"


def better(scores: Mapping[str, Spread]) -> list[str]:
    """The alternatives that are clearly above the default."""
    return [key for key in ALTERNATIVES if _clearly_above(scores[key], scores[DEFAULT])]


def level(scores: Mapping[str, Spread]) -> list[str]:
    """The alternatives that are neither clearly above nor clearly below the default."""
    below = [key for key in ALTERNATIVES if _clearly_above(scores[DEFAULT], scores[key])]
    return [key for key in ALTERNATIVES if key not in better(scores) and key not in below]


def stuck(accuracies: Mapping[str, Spread]) -> list[str]:
    """The alternatives that have not left the plateau of softmax attention."""
    return [key for key in ALTERNATIVES if not accuracies[key].mean - accuracies["softmax"].mean >= LEARNED]


def steps_to_leave(trained: Trained) -> float:
    """The step at which the slowest seed of a run leaves its plateau; infinity if one never does."""
    return max(math.inf if step is None else step for step in trained.steps_below(LEFT))


def _clearly_above(one: Spread, other: Spread) -> bool:
    """Whether the difference of the means is larger than the spread of both together."""
    return one.mean - other.mean > (one.std**2 + other.std**2) ** 0.5


def arms(lab: Lab, toy: Toy) -> list[Arm]:
    """Every variant, and softmax attention; at `--scale hours` only the variants of the paper."""
    variants = [
        Arm(key, variant.title, "lucid", toy.but(options=variant.options))
        for key, variant in VARIANTS.items()
        if variant.paper is not None or lab.scale != HOURS
    ]
    return [*variants, arm(toy.but(attention="softmax"))]


def train_variants(lab: Lab) -> dict[str, Group]:
    """Every arm on needles and on text."""
    needles, text = needle_grid.TOY, TEXT
    if lab.tiny:
        needles, text = needles.but(**TINY, test_lengths=(64,)), text.but(**TINY)
    if lab.scale == HOURS:
        needles = needles.but(steps=LONG_STEPS, test_lengths=(64,))
    return train_arms(lab, {"needles": arms(lab, needles), "text": arms(lab, text)})


def run(lab: Lab) -> Conclusion:
    """Whether one of the paper's alternatives is better than the default."""
    groups = train_variants(lab)
    needles, text = (groups[name][DEFAULT].arm.toy for name in ("needles", "text"))
    titles = {key: one.arm.label for key, one in groups["needles"].items()}
    accuracies = {key: one.mean_accuracy(needles.length) for key, one in groups["needles"].items()}
    losses = {key: spread(one.values(0, text.length, "loss"), 3) for key, one in groups["text"].items()}
    others = ", ".join(f"{titles[key]} {accuracies[key]}" for key in ALTERNATIVES)
    ours = f"mean over needles: key norm {accuracies[DEFAULT]}, {others} %"
    leaving = steps_to_leave(groups["needles"][DEFAULT])
    patient = needles.steps >= PATIENCE * leaving
    because = explain(ours, accuracies, losses, titles)
    if stuck(accuracies):
        left = (
            f"key norm leaves it by step {leaving:.0f}"
            if leaving < math.inf
            else "not every seed of key norm leaves it"
        )
        because += (
            f" On the plateau of softmax attention after {needles.steps} steps: {_titles(stuck(accuracies), titles)}; "
            f"{left}, so this is {'' if patient else 'not '}long enough to say that they stay there."
        )
    paper_accuracies = {key: variant.paper for key, variant in VARIANTS.items()}
    return Conclusion(
        ours=ours,
        verdict=judge(accuracies, losses, patient),
        because=because,
        seeds=len(lab.seeds),
        figures=[
            accuracy_bars(f"Recall of needles after {needles.steps} steps", groups["needles"], needles.length),
            bars(
                f"Character model after {text.steps} steps",
                "validation loss, nats",
                {"": [bar(one.arm.label, one.arm.role, losses[key]) for key, one in groups["text"].items()]},
            ),
        ],
        tables=[
            table(
                "Variants",
                ["", "needles, %", "text, nats", "paper, mean over 2 to 10 needles, %"],
                [[titles[key], accuracies[key], losses[key], paper_accuracies.get(key)] for key in titles],
                note="Row maximum is our reading of the paper's max norm: a global maximum would not be causal.",
            ),
            table(
                "Needles, accuracy %",
                ["", *(f"n = {n}" for n in needles.test_n)],
                [
                    [one.arm.label, *(one.accuracy(n, needles.length) for n in needles.test_n)]
                    for one in groups["needles"].values()
                ],
            ),
        ],
    )


def explain(
    ours: str, accuracies: Mapping[str, Spread], losses: Mapping[str, Spread], titles: Mapping[str, str]
) -> str:
    """Which alternatives are better than key norm or level with it, with needles and on text."""
    because = f"{ours[0].upper()}{ours[1:]}. "
    gains = {key: Spread(-loss.mean, loss.std, loss.count) for key, loss in losses.items()}
    for where, scores in (("with needles", accuracies), ("on text", gains)):
        for words, keys in (("Better than key norm", better(scores)), ("Within noise of it", level(scores))):
            because += f"{words} {where}: {_titles(keys, titles)}. " if keys else ""
    return because + f"Loss of a character model: {', '.join(f'{titles[key]} {loss}' for key, loss in losses.items())}."


def _titles(keys: Sequence[str], titles: Mapping[str, str]) -> str:
    return ", ".join(titles[key] for key in keys)
