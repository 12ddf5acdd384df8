"""Rules that compare one attention with every baseline."""

from collections.abc import Mapping

from .result import Spread

WORDS = {"ahead": "ahead of", "level": "not told apart from", "behind": "behind"}


def outcome(one: Spread, other: Spread) -> str:
    """ "ahead", "behind" or "level": whether the means differ by more than both deviations together.

    Two that read alike, such as 100.0 ± 0.0 and 100.0 ± 0.0, are level.
    """
    if abs(one.mean - other.mean) <= one.std + other.std or str(one) == str(other):
        return "level"
    return "ahead" if one.mean > other.mean else "behind"


def judge_against(ours: Spread, standard: Mapping[str, Spread], others: Mapping[str, Spread], *, floor: float) -> str:
    """The verdict from scores in percent.

    standard: of standard attention, at equal steps and at equal time. others: of the other baselines.
    floor: if no score is above it, nothing was learned, and nothing is judged.
    "holds": ahead of all. "partly": ahead of standard attention, not of all others. Else "does not hold".
    """
    if max(score.mean for score in (ours, *standard.values(), *others.values())) <= floor:
        return "too small to judge"
    if any(outcome(ours, score) != "ahead" for score in standard.values()):
        return "does not hold"
    return "holds" if all(outcome(ours, score) == "ahead" for score in others.values()) else "partly"


def explain_against(name: str, ours: Spread, baselines: Mapping[str, Spread]) -> str:
    """LUCID's score, and the baselines that it is ahead of, level with and behind. baselines: by title."""
    sentences = []
    for key, words in WORDS.items():
        named = [f"{title} ({score} %)" for title, score in baselines.items() if outcome(ours, score) == key]
        if named:
            sentences.append(f"{words} {', '.join(named)}")
    return f"{name} has {ours} %: {'; '.join(sentences)}."
