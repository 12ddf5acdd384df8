"""Forgetting MQAR (zoology): recall of values that were written again, a benchmark that others chose. Not in the paper.

Published: vocabulary 8192, two layers without MLPs, one head, short convolutions, training up to 256 tokens with 4 to
36 pairs of which four keys are written again, tests to 2048 tokens, four learning rates, 32 epochs of 180 000 rows. Two
cores force: vocabulary 512, width 64 with two heads of 32, training at 64 tokens with 4 or 9 pairs, 600 steps of 32
rows, two rates. Tests keep the pairs and have up to 16 times the tokens. These settings were chosen with softmax
attention alone (one trial, seed 100: 93 % at 64 tokens, 59 to 62 % at 1024).

Predicted before the runs: on forgetting MQAR LUCID is ahead of softmax attention at equal steps and at equal time, and
more so at longer lengths, also with MLPs and with Muon; a learned centre changes little; on plain MQAR, whose keys are
written once, LUCID and softmax attention tie.
"""

from typing import Any

from ..toys.arms import Trained, length_lines
from ..toys.contest import judge_against, mean_score
from ..toys.lab import SMALL, Lab
from ..toys.neighbours import EQUAL_TIME, FEW, STUDY, STUDY_TOY, Arms, run_study, study_table
from ..toys.results import Claim, Conclusion, Spread, explain_against

CLAIM = Claim(
    title="Forgetting MQAR: the last value of a key counts",
    section="not in the paper",
    says="LUCID overwrites (A.4), so on zoology's forgetting MQAR it should be ahead of softmax attention and of its "
    "neighbours; on plain MQAR it should tie.",
    paper="no number given",
)
TOY = STUDY_TOY.but(
    task="forgetting_mqar",
    n=(4, 9),
    length=64,
    steps=600,
    batch=32,
    test_n=(4, 9),
    test_lengths=(64, 128, 256, 512, 1024),
    test_batch=96,
)
# Arms of `--scale small`. `--scale hours` has all of STUDY, and further groups with the main arms.
CORE = STUDY[:5]
MAIN: Arms = tuple((name, None) for name in FEW)
GROUPS: dict[str, dict[str, Any]] = {
    "with MLPs": {"mlp": 2.0},
    "plain MQAR": {"task": "mqar"},
    "with Muon": {"muon": True},
}
# With n = 4 all keys are written twice: a model that does not see the order has 50 %.
N, FLOOR = 4, 60.0


def judge(ours: Spread, standard: dict[str, Spread], others: dict[str, Spread]) -> str:
    """The verdict from mean accuracies over lengths of 1 to 16 times that of training, with four keys, all rewritten.

    ours: LUCID with its default sharpness. standard: softmax attention with a token shift, at equal steps and at equal
    time. others: the neighbours, without further variants of LUCID. "holds": clearly ahead of all. "partly": clearly
    ahead of softmax attention at equal steps, and level at equal time or not ahead of all neighbours. Otherwise "does
    not hold"; "too small to judge" if no score exceeds 60 %.
    """
    return judge_against(ours, standard, others, FLOOR)


def run(lab: Lab) -> Conclusion:
    """CORE; at `--scale hours` all arms, and GROUPS at the rates of the first group."""
    small = lab.scale == SMALL
    group = run_study(lab, TOY, CORE if small else STUDY)
    rates = {key: one.arm.toy.rate for key, one in group.items()}
    changes = {} if small else GROUPS
    groups = {name: run_study(lab, TOY.but(**change), MAIN, rates) for name, change in changes.items()}
    lengths = group["softmax"].arm.toy.test_lengths

    def score(one: Trained) -> Spread:
        return mean_score(one, (N,), lengths)

    ours = score(group["lucid"])
    standard = {group[key].arm.label: score(group[key]) for key in ("softmax", EQUAL_TIME)}
    others = {one.arm.label: score(one) for key, one in group.items() if not key.startswith(("softmax", "lucid"))}

    told = [
        f" {name[0].upper()}{name[1:]}: " + ", ".join(f"{one.arm.label} {score(one)} %" for one in arms.values()) + "."
        for name, arms in groups.items()
    ]
    because = (
        f"Mean over {lengths[0]} to {lengths[-1]} tokens, four keys, all rewritten. "
        f"{explain_against('LUCID', ours, standard | others)}{''.join(told)}"
    )
    return Conclusion(
        ours=f"LUCID {ours} %, softmax {score(group['softmax'])} %, at equal time {score(group[EQUAL_TIME])} %",
        verdict=judge(ours, standard, others),
        because=because,
        seeds=len(lab.seeds),
        figures=[length_lines(f"Forgetting MQAR, trained at {TOY.length} tokens, four keys", group, N)],
        tables=[
            *(study_table(f"Forgetting MQAR, {n} pairs, accuracy %", group, n) for n in TOY.test_n),
            *(study_table(f"Forgetting MQAR, {name}, {N} pairs, accuracy %", arms, N) for name, arms in groups.items()),
        ],
    )
