"""Learned β (A.4): "we did not find performance gains from learning β".

Table 5 contradicts it at ten needles, where learned β has 26.8 % and β = 1 25.2 %; at 2 to 8 needles it has less. The
runs are those of `variants`.
"""

from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, Spread, outcome, spread, table
from . import variants

CLAIM = Claim(
    title="Learning β brings nothing",
    section="A.4",
    says="The step sizes β of the writes may be fixed at 1: learning them brings no gain.",
    paper="needles 2, 4, 6, 8, 10: β = 1 76.6, 55.8, 43.6, 33.8, 25.2 %, learned β 73.8, 48.0, 36.8, 31.8, 26.8 %",
)
KEYS = (variants.DEFAULT, "learned_beta")


def judge(needles: tuple[Spread, Spread], text: tuple[Spread, Spread], softmax: Spread) -> str:
    """The verdict. needles: accuracies with β = 1 and with learned β; text: losses of both.

    "holds": learned β is clearly better neither with needles nor on text. "partly": on one of both. Otherwise "does not
    hold". Nothing is judged if neither is LEARNED points above softmax attention with needles.
    """
    if max(score.mean for score in needles) - softmax.mean < variants.LEARNED:
        return "too small to judge"
    gains = [outcome(needles[1], needles[0]) == "ahead", outcome(text[1], text[0]) == "behind"]
    return "does not hold" if all(gains) else "partly" if any(gains) else "holds"


def run(lab: Lab) -> Conclusion:
    """Needles and text with both."""
    groups = variants.train_variants(lab)

    def scores(key: str) -> tuple[Spread, Spread]:
        needles, text = groups["needles"][key], groups["text"][key]
        losses = text.values(0, text.arm.toy.length, "loss")
        return needles.mean_accuracy(needles.arm.toy.length), spread(losses, 3)

    (fixed, fixed_loss), (learned, learned_loss) = map(scores, KEYS)
    softmax, _ = scores("softmax")
    toy, arms = groups["needles"][KEYS[0]].arm.toy, [groups["needles"][key] for key in KEYS]
    ours = f"needles: β = 1 {fixed} %, learned {learned} %; text: β = 1 {fixed_loss} nats, learned {learned_loss} nats"
    return Conclusion(
        ours=ours,
        verdict=judge((fixed, learned), (fixed_loss, learned_loss), softmax),
        because=f"{ours[0].upper()}{ours[1:]}. Softmax attention finds {softmax} % of the needles. The paper "
        "contradicts itself: Table 5 has learned β ahead at ten needles.",
        seeds=len(lab.seeds),
        tables=[
            table(
                "Needles, accuracy %",
                ["", *(f"n = {n}" for n in toy.test_n)],
                [[one.arm.label, *(one.accuracy(n, toy.length) for n in toy.test_n)] for one in arms],
            )
        ],
    )
