"""The flip-flop language (Liu et al. 2023): glitches of attention, a benchmark that others chose. Not in the paper.

Published: 512 tokens with 80 % ignore, tests with 98 % (sparse) and 10 % (dense), six layers of width 512, 10 000
steps. Two cores force: two layers of width 64 with MLPs, training at 64 tokens, 600 steps of 16 rows, three rates.
Tests have 1, 8 and 32 times the tokens. No arm sees the token before, as in the published models: with a token shift
softmax attention had 97 to 100 % on dense sequences of 2048 tokens after 300 steps. Without it, trained as here (one
trial at 3e-3, seed 100), it had 100, 95 and 75 % on dense sequences of 128, 512 and 2048 tokens, 94, 77 and 60 % on
sparse ones. All settings were chosen with softmax attention alone. About 8 core-minutes: `--scale small` was cut to the
arms that the rule needs for time, before any result was read.

Predicted before the runs: LUCID glitches less than softmax attention on dense sequences, LUCID-PaTH on both.
"""

from ..toys.arms import length_lines
from ..toys.contest import mean_score
from ..toys.lab import SMALL, Lab
from ..toys.neighbours import EQUAL_TIME, STUDY_TOY, run_study, study_table
from ..toys.results import Claim, Conclusion, explain_against, outcome

CLAIM = Claim(
    title="Flip-flop language: fewer glitches",
    section="not in the paper",
    says="A read must repeat the last write among distractors. LUCID erases what was overwritten, so it should glitch "
    "less than softmax attention on dense sequences, and LUCID-PaTH on dense and sparse ones.",
    paper="no number given",
)
TRAINED, SPARSE, DENSE = 80, 98, 10
ARMS = tuple((name, None) for name in ("softmax", "lucid", "lucid_path"))
# At `--scale hours` alone.
OTHERS = tuple((name, None) for name in ("path", "forgetting", "deltaformer"))
TOY = STUDY_TOY.but(
    task="flip_flop",
    n=(TRAINED,),
    length=64,
    mlp=2.0,
    token_shift=False,
    steps=600,
    test_n=(TRAINED, SPARSE, DENSE),
    test_lengths=(64, 512, 2048),
    test_batch=48,
)
RATES = (1e-3, 3e-3, 1e-2)


def judge(dense: bool, path_dense: bool, path_sparse: bool) -> str:
    """The verdict from mean accuracies on reads, over lengths of 1 to 32 times that of training.

    dense: LUCID is clearly ahead of softmax attention, at equal steps and at equal time, with 10 % ignore.
    path_dense, path_sparse: LUCID-PaTH is, with 10 % and with 98 % ignore. "holds": all three. "partly": some.
    Otherwise "does not hold".
    """
    return {3: "holds", 0: "does not hold"}.get(dense + path_dense + path_sparse, "partly")


def run(lab: Lab) -> Conclusion:
    """The score is the mean over lengths."""
    group = run_study(lab, TOY, ARMS if lab.scale == SMALL else (*ARMS, *OTHERS), grid=RATES)
    toy = group["softmax"].arm.toy

    def ahead(key: str, n: int) -> bool:
        scores = (mean_score(group[one], (n,), toy.test_lengths) for one in (key, "softmax", EQUAL_TIME))
        ours, *standard = scores
        return all(outcome(ours, score) == "ahead" for score in standard)

    def told(n: int) -> str:
        scores = {one.arm.label: mean_score(one, (n,), toy.test_lengths) for one in group.values()}
        return explain_against("LUCID", scores.pop("LUCID"), scores)

    # Below `--scale small` LUCID-PaTH is left out.
    path = "lucid_path" if "lucid_path" in group else "lucid"
    return Conclusion(
        ours=f"dense: {told(DENSE)}",
        verdict=judge(ahead("lucid", DENSE), ahead(path, DENSE), ahead(path, SPARSE)),
        because=f"Accuracy on reads, mean over {toy.test_lengths[0]} to {toy.test_lengths[-1]} tokens. Dense (10 % "
        f"ignore): {told(DENSE)} Sparse (98 %): {told(SPARSE)} As trained (80 %): {told(TRAINED)}",
        seeds=len(lab.seeds),
        figures=[
            length_lines(f"Flip-flop language, {n} % ignore, trained at {TOY.length} tokens", group, n)
            for n in toy.test_n
        ],
        tables=[
            study_table(f"{n} % ignore, accuracy on reads %", group, n, note="The glitch rate is 100 minus this.")
            for n in toy.test_n
        ],
    )
