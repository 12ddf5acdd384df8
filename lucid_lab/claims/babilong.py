"""Stories hidden in a long text (§4.3, BABILong).

Here: bAbI's stories QA1 to QA3 among RULER's noise, read word by word by toys that learn in stages, from QA1 alone in
short texts on. They are tested with other stories and up to four times the length of training.
"""

from collections.abc import Mapping

from ..toys.arms import learning_curves
from ..toys.contest import WORDS_TOY, Contest, contest_table, judge_against, mean_score, run_contest
from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, Spread, explain_against

CLAIM = Claim(
    title="Facts of a story are found in a long text",
    section="4.3",
    says="Fine-tuned on BABILong, standard and Diff attention lose the facts as the context grows from 32K to 128K "
    "tokens, while LUCID with PaTH positions keeps its accuracy.",
    paper="mean of QA1–QA5: standard and Diff ~0.14 at 32K, near zero at 128K; LUCID-PaTH 0.21–0.25 at all lengths",
)
CONTEST = Contest(
    WORDS_TOY.but(
        task="stories",
        steps=1600,
        stages=((56, (1,)), (96, (1, 2)), (160, (1, 2, 3)), (192, (1, 2, 3))),
        test_n=(1, 2, 3),
        test_lengths=(192, 384, 768),
        test_batch=128,
    ),
    attentions=("softmax", "lucid", "path", "lucid_path"),
    rates=(3e-3, 6e-3),
    trial_steps=300,
    pairs=(("softmax", "lucid"), ("path", "lucid_path")),
)
# There are six rooms, all equally likely.
CHANCE = 100 / 6
# Points above CHANCE that the best arm must reach at the length of training.
ABOVE_CHANCE = 15.0


def judge(scores: Mapping[str, Spread], best: float) -> str:
    """The verdict, from accuracies beyond the length of training, mean over tasks and lengths, by arm.

    "holds": LUCID-PaTH is clearly ahead of softmax attention and of PaTH, at equal steps and at equal time. "partly":
    of softmax attention, and not of PaTH. Otherwise "does not hold".
    best: the highest accuracy of any arm at the length of training. Nothing is judged if it is less than ABOVE_CHANCE
    points above any room, or if no arm is above any room beyond that length.
    """
    standard, path = (
        {key: score for key, score in scores.items() if key.startswith(name)} for name in ("softmax", "path")
    )
    return judge_against(scores["lucid_path"], standard, path, CHANCE if best >= CHANCE + ABOVE_CHANCE else 100.0)


def run(lab: Lab) -> Conclusion:
    """LUCID-PaTH against softmax attention and PaTH, beyond the length of training."""
    contest = CONTEST.at(lab)
    group = run_contest(lab, contest)
    tasks, (length, *beyond) = contest.toy.test_n, contest.toy.test_lengths
    scores = {key: mean_score(trained, tasks, beyond) for key, trained in group.items()}
    best = max(mean_score(trained, tasks, [length]).mean for trained in group.values())
    named = {group[key].arm.label: score for key, score in scores.items() if not key.startswith("lucid")}
    compared = " ".join(explain_against(group[key].arm.label, scores[key], named) for key in ("lucid_path", "lucid"))
    titles = [f"QA{n}" for n in tasks]
    ours = "; ".join(f"{trained.arm.label} {scores[key]} %" for key, trained in group.items())
    return Conclusion(
        ours=f"{', '.join(titles)} beyond {length} tokens: {ours}",
        verdict=judge(scores, best),
        because=f"Right answers, mean of {', '.join(titles)} at {' and '.join(map(str, beyond))} tokens, trained up to "
        f"{length}; any room would give {CHANCE:.0f} %. {compared} At {length} tokens the best has {best:.1f} %.",
        seeds=len(lab.seeds),
        figures=[
            learning_curves(
                "Learning to answer about stories", group, note="Mean over seeds. Stages follow each other."
            )
        ],
        tables=[
            contest_table(
                "Right answers here",
                group,
                "task",
                titles,
                "Percent, mean ± standard deviation over seeds. Seconds are those of a processor for one training. All "
                "arms have a token shift on keys and values.",
            )
        ],
    )
