"""Needles in a haystack of text (§4.2).

The paper (Table 3, "MNIAH task at 2048 sequence length"): with 2, 4 and 6 needles standard attention finds 74.2, 51.0
and 38.8 %, LUCID 76.6, 55.8 and 43.6 %; over needles and lengths LUCID is 10 to 26 % ahead.

Here: RULER's needles and noise, read word by word by toys that learn in stages, from one needle to many. The attentions
of the paper's table and LUCID-PaTH take part, and are tested with up to four times the length of training.
"""

from collections.abc import Mapping

from ..toys.arms import accuracy_maps, learning_curves
from ..toys.contest import WORDS_TOY, Contest, contest_table, judge_against, mean_score, run_contest
from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, Spread, explain_against

CLAIM = Claim(
    title="More needles are found in a haystack of text",
    section="4.2",
    says="LUCID retrieves better than standard attention for all numbers of needles and lengths, with the largest "
    "gains where the task is hardest.",
    paper="M-NIAH at 2048 tokens with 2, 4, 6 needles: standard 74.2, 51.0, 38.8 %, LUCID 76.6, 55.8, 43.6 %; over "
    "needles and lengths LUCID is 10–26 % ahead",
)
CONTEST = Contest(
    WORDS_TOY.but(
        task="needle_sentences",
        steps=1000,
        stages=((72, (1, 2, 4)), (144, (2, 4, 8)), (256, (4, 8, 12))),
        test_n=(1, 2, 4, 8, 12),
        test_lengths=(256, 512, 1024),
    ),
    attentions=("softmax", "lucid", "path", "lucid_path", "diff", "delta"),
    rates=(3e-3, 6e-3),
    trial_steps=400,
    pairs=(("softmax", "lucid"), ("path", "lucid_path")),
)
# The task counts as learned from this percentage of single needles on, at the length of training; and needles count as
# distinguished from this many points above a random pick.
ONE_NEEDLE, APART = 90.0, 10.0


def judge(scores: Mapping[str, Spread], single: float, guess: float) -> str:
    """The verdict, from accuracies with several needles, mean over all lengths, by arm.

    "holds": LUCID is clearly ahead of every baseline. "partly": of softmax attention at equal steps, and not behind it
    at equal time. Otherwise "does not hold".
    single: the best accuracy of any arm with one needle at the length of training. guess: that of picking any needle.
    Nothing is judged if `single` is below ONE_NEEDLE, or if no arm is more than APART points above `guess`.
    """
    standard, others = baselines(scores)
    return judge_against(scores["lucid"], standard, others, guess + APART if single >= ONE_NEEDLE else 100.0)


def baselines(scores: Mapping[str, Spread]) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """The scores of softmax attention, at equal steps and at equal time, and those of the other baselines."""
    standard = {key: score for key, score in scores.items() if key.startswith("softmax")}
    others = {key: score for key, score in scores.items() if not key.startswith(("softmax", "lucid"))}
    return standard, others


def run(lab: Lab) -> Conclusion:
    """LUCID and LUCID-PaTH against every baseline, over all lengths, with several needles."""
    contest = CONTEST.at(lab)
    group = run_contest(lab, contest)
    (one, *several), lengths = contest.toy.test_n, contest.toy.test_lengths
    scores = {key: mean_score(trained, several, lengths) for key, trained in group.items()}
    single = max(trained.accuracy(one, lengths[0]).mean for trained in group.values())
    guess = sum(100 / n for n in several) / len(several)
    standard, others = baselines(scores)
    named = {group[key].arm.label: score for key, score in (standard | others).items()}
    compared = " ".join(explain_against(group[key].arm.label, scores[key], named) for key in ("lucid", "lucid_path"))
    return Conclusion(
        ours="several needles: " + "; ".join(f"{one.arm.label} {scores[key]} %" for key, one in group.items()),
        verdict=judge(scores, single, guess),
        because=f"Answers found among {several[0]} to {several[-1]} needles, mean over {lengths[0]} to {lengths[-1]} "
        f"tokens; any needle would give {guess:.0f} %. {compared} One needle: at best {single:.1f} % at {lengths[0]} "
        "tokens.",
        seeds=len(lab.seeds),
        figures=[
            accuracy_maps("Answers found", group, "needles", f"Trained with at most {lengths[0]} tokens."),
            learning_curves("Learning to find needles", group, note="Mean over seeds. Stages follow each other."),
        ],
        tables=[
            contest_table(
                "Answers found here",
                group,
                "needles",
                [str(n) for n in contest.toy.test_n],
                "Percent of the answers, mean ± standard deviation over seeds. Trained up to the first length. Seconds "
                "are those of a processor for one training. All arms have a token shift on keys and values.",
            )
        ],
    )
