"""LUCID where attention is not causal: an encoder and block diffusion. Not in the paper, which calls it a limitation.

Three tasks: masked language modelling of bytes and recall among repeated keys, both with one block (`block=None`), and
the denoising of the last of many blocks of 16 tokens. Standard attention is the same module at strength 0, where
nothing is solved. Every arm takes the best of two learning rates. These settings were chosen before any run.
"""

from ..toys.arms import Arm, accuracy_bars, accuracy_table, train_arms
from ..toys.contest import best_rates, late_arm, mean_score
from ..toys.lab import Lab
from ..toys.neighbours import EQUAL_TIME, RATES
from ..toys.results import Claim, Conclusion, explain_against, outcome
from ..toys.training import Toy

CLAIM = Claim(
    title="Encoders and block diffusion: LUCID in both directions",
    section="not in the paper",
    says="With symmetric blocks on the diagonal of P, LUCID should recall better than softmax attention where keys "
    "repeat, and predict hidden bytes better, in an encoder and in block diffusion.",
    paper="a stated limitation, no number",
)
TEXT = Toy(
    task="masked_characters",
    n=(15, 30),
    length=128,
    layers=2,
    heads=4,
    mlp=2.0,
    steps=400,
    test_n=(15,),
    test_lengths=(128,),
)
TASKS = {
    "repeated keys": Toy(
        task="repeated_keys", n=(8, 16, 32), length=128, rope=False, test_n=(8, 16, 32, 48), test_lengths=(128,)
    ),
    "masked bytes": TEXT,
    "last block": TEXT.but(task="last_block", n=(25, 50, 75, 100), test_n=(25, 50, 100)),
}
TITLES = {"softmax": "softmax", "lucid": "LUCID"}
NOTES = {
    "repeated keys": "n: keys of a sequence, each asked once; trained with 8 to 32.",
    "masked bytes": "n: percent of the bytes that are hidden; trained with 15 and 30.",
    "last block": "n: percent of the last block that is hidden; trained with 25 to 100.",
}
BLOCK = {"repeated keys": None, "masked bytes": None, "last block": 16}


def judge(ahead: int, behind: int) -> str:
    """The verdict from three tasks: repeated keys, masked bytes, the last block. A score is the mean test accuracy.

    ahead: in how many LUCID is clearly ahead of softmax attention, at equal steps and at equal time. behind: in how
    many it is clearly behind one of them. "holds": ahead in all three. "partly": ahead in some and behind in none.
    Otherwise "does not hold".
    """
    if ahead == len(TASKS):
        return "holds"
    return "partly" if ahead and not behind else "does not hold"


def run(lab: Lab) -> Conclusion:
    """All arms of all tasks."""
    groups = {}
    for name, toy in TASKS.items():
        if lab.tiny:
            toy = toy.but(steps=3, batch=2, test_batch=2)
        options = {"lucid": {"block": BLOCK[name]}, "softmax": {"block": BLOCK[name], "strength": 0.0}}
        arms = [Arm(key, title, key, toy.but(options=options[key])) for key, title in TITLES.items()]
        if lab.scale.every_attention:
            arms = best_rates(lab, arms, RATES, 2 * toy.steps // 3)
        group = train_arms(lab, {"": arms})[""]
        groups[name] = group | train_arms(lab, {"": [late_arm(group["softmax"], group["lucid"])]})[""]
    ahead, behind, sentences = 0, 0, []
    for name, group in groups.items():
        toy = TASKS[name]
        scores = {key: mean_score(one, toy.test_n, toy.test_lengths) for key, one in group.items()}
        against = {outcome(scores["lucid"], scores[key]) for key in ("softmax", EQUAL_TIME)}
        ahead, behind = ahead + (against == {"ahead"}), behind + ("behind" in against)
        standard = {one.arm.label: scores[key] for key, one in group.items() if key != "lucid"}
        sentences.append(f"{name.capitalize()}: {explain_against('LUCID', scores['lucid'], standard)}")
    return Conclusion(
        ours=sentences[0],
        verdict=judge(ahead, behind),
        because=" ".join(sentences),
        seeds=len(lab.seeds),
        figures=[accuracy_bars(_title(name), group, TASKS[name].length) for name, group in groups.items()],
        tables=[accuracy_table(_title(name), group, TASKS[name].length, NOTES[name]) for name, group in groups.items()],
    )


def _title(name: str) -> str:
    return f"{name.capitalize()}: accuracy, %"
