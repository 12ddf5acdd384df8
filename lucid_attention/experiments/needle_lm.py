"""§4.2: needles in a haystack, as text.

The paper (Table "MNIAH task at 2048 sequence length"): with 2, 4 and 6 needles standard attention finds 74.2, 51.0 and
38.8 %, LUCID 76.6, 55.8 and 43.6 %; over needles and lengths LUCID is 10 to 26 % ahead.

Here: RULER's prompts through a tokenizer and the evaluation harness, asked of models that were trained on such prompts.
One needle is S-NIAH. The keys and values that are asked for were never seen in training.
"""

from .result import Claim, Conclusion, bar, bars, heatmaps, table
from .steps import Step, evaluate, train, tune
from .study import Done
from .jobs import Job
from .text_comparison import ARMS, Comparison, judged, percent
from .text_training import TextRun

CLAIM = Claim(
    title="More needles are found in a haystack of text",
    section="4.2",
    says="LUCID retrieves better than standard attention for all numbers of needles and lengths, and the more so the "
    "harder the task is.",
    paper="M-NIAH at 2048 tokens with 2, 4, 6 needles: standard 74.2, 51.0, 38.8 %, LUCID 76.6, 55.8, 43.6 %; after "
    "fine-tuning 10–26 % ahead over needles and lengths",
)
# Table "MNIAH task at 2048 sequence length": 2, 4, 6 needles.
PAPER = {
    "softmax": (74.2, 51.0, 38.8),
    "diff": (72.4, 35.4, 26.0),
    "delta": (37.0, 16.8, 11.0),
    "path": (61.4, 44.2, 37.2),
    "lucid": (76.6, 55.8, 43.6),
}
NEEDLES, LENGTHS = (1, 2, 4), (256, 384)


def comparison(scale: str) -> Comparison:
    """The runs of a scale."""
    smoke = scale == "smoke"
    steps = 4 if smoke else 1000
    batch, samples = 8, 2 if smoke else 50
    needles, lengths = ((1, 2), (256,)) if smoke else (NEEDLES, LENGTHS)
    model = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = TextRun(
        texts={
            "kind": "needles",
            "settings": {"needles": needles, "keys": "words", "length": 320},
            "samples": 60 if smoke else steps * batch,
            "vocabulary": 800,
        },
        asked={
            "tasks": ("mniah",),
            "options": {"needles": needles, "lengths": lengths, "samples": samples, "haystack": "noise"},
        },
        model=model | {"initializer_range": 0.1, "tie_word_embeddings": True},
        sequence_length=320,
        steps=steps,
        batch=batch,
        rate=5e-3,
    )
    return Comparison(base, 1 if smoke else 3, (60, 90), equal_time=not smoke)


def plan(scale: str, done: Done) -> list[Job]:
    """Texts, then models."""
    return comparison(scale).plan(done)


def conclude(scale: str, done: Done) -> Conclusion:
    """Judged by the mean over all cells with more than one needle."""
    runs = comparison(scale)
    needles, lengths = (runs.base.asked["options"][name] for name in ("needles", "lengths"))

    def found(arm: str, n: int, length: int | None = None) -> Spread:
        return percent(
            runs.score(
                done,
                arm,
                "score",
                lambda cell: cell["labels"]["needles"] == n and length in (None, cell["labels"]["length"]),
            )
        )

    several = {arm: percent(runs.score(done, arm, "score", lambda cell: cell["labels"]["needles"] > 1)) for arm in runs.arms}
    verdict, because = judged(several, floor=10, ceiling=95, what="several needles found")
    if scale == "smoke":
        verdict, because = "too small to judge", "A smoke test: it shows that the parts fit."
    at_one = {arm: found(arm, 1) for arm in runs.arms}
    return Conclusion(
        ours="",
        verdict=verdict,
        because=because,
        seeds=runs.seeds,
    )
