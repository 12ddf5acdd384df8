"""Centred and whitened keys from scratch, where LUCID failed (not in the paper): large heads with MLPs, text with RoPE.

Needles: two layers with MLPs and two heads of 64. Text: the character model of `language_model`. Every arm has
two rates. The centre, or centre and map, of the keys of P are learned, from zero and the identity. At `--scale hours`
needles are those of `needle_lm`, in a haystack of text, and centre and map follow mean and covariance of the keys.

Predicted before the runs: neither helps. Keys of a new model have no common mean, and P of heads of 64 stays near the
identity under any linear map; what grows in training is what the loss asks for, with or without a map.
Before those at `--scale hours`: the same. P of heads of 16 is far from the identity already, and a map that moves in
training takes from LUCID what it has learned.
"""

from collections.abc import Callable

from ..toys.arms import Group, Trained, accuracy_bars, accuracy_table
from ..toys.contest import mean_score
from ..toys.lab import HOURS, Lab
from ..toys.neighbours import CENTRED, RATES, RUNNING, WHITENED, run_study
from ..toys.results import Claim, Conclusion, Spread, explain_against, outcome, spread, table
from ..toys.training import CHARACTER_MODEL, Toy
from .needle_lm import CONTEST

CLAIM = Claim(
    title="Centred and whitened keys help from scratch",
    section="not in the paper",
    says="In a pretrained model a centre and a whitening map make LUCID act on what distinguishes keys. Learned from "
    "scratch, they should help where LUCID failed: needles with large heads and MLPs, and text.",
    paper="no number given",
)
NEEDLES = Toy(task="needles", layers=2, heads=2, head_dim=64, mlp=2.0, steps=600)
TEXT = CHARACTER_MODEL.but(steps=300, batch=4, test_batch=64)
STUDY = (("softmax", None), ("lucid", None), ("lucid", CENTRED), ("lucid", WHITENED))
FOLLOWING = (*STUDY[:2], ("lucid", RUNNING))
MAPPED = ("lucid+centred", "lucid+whitened", "lucid+running")


def judge(raw: tuple[Spread, Spread], mapped: list[tuple[Spread, Spread]]) -> str:
    """The verdict from (needles found in percent, minus the loss on text in nats), of LUCID without and with a map.

    "holds": a map is clearly ahead on both. "partly": on one. Otherwise "does not hold".
    """
    best = max((sum(outcome(*pair) == "ahead" for pair in zip(one, raw, strict=True)) for one in mapped), default=0)
    return {2: "holds", 1: "partly", 0: "does not hold"}[best]


def run(lab: Lab) -> Conclusion:
    """All arms on both tasks, and softmax attention with LUCID's time."""
    words = lab.scale == HOURS
    start, study, rates = (CONTEST.toy, FOLLOWING, CONTEST.rates) if words else (NEEDLES, STUDY, RATES)
    needles, text = run_study(lab, start, study, grid=rates), run_study(lab, TEXT, study)
    toy, tested = needles["lucid"].arm.toy, text["lucid"].arm.toy

    def found(one: Trained) -> Spread:
        return mean_score(one, toy.test_n, toy.test_lengths)

    def loss(one: Trained, sign: int = 1) -> Spread:
        return spread((sign * value for value in one.values(0, tested.test_lengths[0], "loss")), 3)

    scores = {key: (found(needles[key]), loss(text[key], -1)) for key in needles}
    others = {one.arm.label: found(one) for key, one in needles.items() if key != "lucid"}
    rows = [
        [one.arm.label, loss(one), one.arm.toy.steps, one.arm.toy.rate, round(one.seconds)] for one in text.values()
    ]
    return Conclusion(
        ours=f"needles: {_listed(needles, found)}; text: {_listed(text, loss)}",
        verdict=judge(scores["lucid"], [scores[key] for key in MAPPED if key in scores]),
        because=f"Needles, mean over n: {explain_against('LUCID', found(needles['lucid']), others)} Text, nats a "
        f"character: {_listed(text, loss)}.",
        seeds=len(lab.seeds),
        figures=[
            accuracy_bars(
                "Needles in text" if words else "Needles, heads of 64 with MLPs", needles, toy.test_lengths[0]
            )
        ],
        tables=[
            accuracy_table("Needles found, %", needles, toy.test_lengths[0]),
            table("Text", ["", "loss, nats", "steps", "rate", "s"], rows),
        ],
    )


def _listed(group: Group, score: Callable[[Trained], Spread]) -> str:
    return ", ".join(f"{one.arm.label} {score(one)}" for one in group.values())
