"""Word problems (Merrill et al. 2024, Grazzi et al. 2024): state tracking, benchmarks that others chose.

Not in the paper. Judged: all permutations of five things, letters that move at most two of them. Such a letter is a
reflection, and so is a write with β = 2. Also: A5, whose letters are all even permutations.

Published: words of up to 20 letters, width 512, answers at every letter. Two cores force: two layers of width 64 with
MLPs, training at 16 letters, 1000 steps of 32 words, two rates; A5 and two more arms at `--scale hours` alone. Tests
have 1, 4 and 16 times the letters. Chosen with softmax attention alone (seed 100): of swaps it knew three letters; of
A5 the first letter alone, also with 6 letters, 1500 steps and width 128. About 5 core-minutes.

Predicted before the runs: LUCID with step sizes β ≤ 1 does no better than softmax attention, as Grazzi et al. prove for
linear recurrences with eigenvalues in [0, 1]; β ≤ 2, as for DeltaNet, may help. On A5 nothing here learns more than the
first letters.
"""

from ..toys.arms import length_lines
from ..toys.lab import SMALL, Lab
from ..toys.neighbours import BETA, BETA_2, DOUBLE_BETA, EQUAL_TIME, STUDY_TOY, run_study, study_table
from ..toys.results import Claim, Conclusion, Spread, explain_against, outcome

CLAIM = Claim(
    title="Word problems of swaps: step sizes to 2 track a state",
    section="not in the paper",
    says="A step size between 1 and 2 reverses what is stored. It lets DeltaNet track states and should help LUCID.",
    paper="no number given",
)
# Arms of `--scale small`. `--scale hours` has OTHERS too, and A5_ARMS on A5.
CORE = (("softmax", None), ("gated_delta", DOUBLE_BETA), ("lucid", None), ("lucid", BETA), ("lucid", BETA_2))
OTHERS = (("deltaformer", None), ("lucid_path", None))
A5_ARMS = (("softmax", None), ("gated_delta", DOUBLE_BETA), ("lucid", None), ("lucid", BETA_2))
TOY = STUDY_TOY.but(
    task="words_swaps",
    n=(0,),
    length=16,
    mlp=2.0,
    embedding_std=1.0,
    steps=1000,
    batch=32,
    test_n=(0,),
    test_lengths=(16, 64, 256),
)


def judge(doubled: Spread, single: Spread, softmax: Spread, late: Spread) -> str:
    """The verdict from accuracies at the length of training.

    doubled, single: LUCID with learned β to 2 and to 1. softmax, late: softmax attention at equal steps and with the
    time of LUCID. "holds": β to 2 is clearly ahead of all three. "partly": of β to 1, not of softmax attention.
    Otherwise "does not hold".
    """
    if outcome(doubled, single) != "ahead":
        return "does not hold"
    return "holds" if all(outcome(doubled, one) == "ahead" for one in (softmax, late)) else "partly"


def run(lab: Lab) -> Conclusion:
    """CORE; at `--scale hours` all arms, and A5. Below `--scale small` there is no β, and LUCID takes its place."""
    small = lab.scale == SMALL
    groups = {"Swaps": run_study(lab, TOY, CORE if small else (*CORE, *OTHERS))}
    group = groups["Swaps"]
    if not small:
        rates = {key: one.arm.toy.rate for key, one in group.items()}
        groups["A5"] = run_study(lab, TOY.but(task="words_a5"), A5_ARMS, rates)
    scores = {key: one.accuracy(0, TOY.length) for key, one in group.items()}
    doubled, single = (scores.get(key, scores["lucid"]) for key in ("lucid+beta_2", "lucid+beta"))
    others = {one.arm.label: scores[key] for key, one in group.items() if key != "lucid+beta_2"}
    return Conclusion(
        ours=f"LUCID with β to 2 {doubled} %, to 1 {single} %, softmax {scores['softmax']} %",
        verdict=judge(doubled, single, scores["softmax"], scores[EQUAL_TIME]),
        because=f"Swaps, {TOY.length} letters. {explain_against('LUCID with β to 2', doubled, others)}",
        seeds=len(lab.seeds),
        figures=[length_lines(f"{name}, trained at {TOY.length} letters", arms, 0) for name, arms in groups.items()],
        tables=[study_table(f"{name}, accuracy over all letters %", arms, 0) for name, arms in groups.items()],
    )
