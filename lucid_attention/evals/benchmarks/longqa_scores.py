"""The metrics of LongBench and SCROLLS, which the harness takes from packages and downloads that may not be there."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

ROUGES = ("rouge1", "rouge2", "rougeL")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles, as in SQuAD."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def token_f1(output: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words; 0 where none is shared."""
    told, wanted = normalized(output), normalized(answer)
    shared = sum((Counter(told) & Counter(wanted)).values())
    return 2 * shared / (len(told) + len(wanted)) if shared else 0.0


def best_f1(output: str, answers: Sequence[str]) -> float:
    """Against the answer that fits best."""
    return max(token_f1(output, answer) for answer in answers)


def is_yes_no(answer: str) -> bool:
    """Whether an answer is yes or no and nothing else."""
    return normalized(answer) in (["yes"], ["no"])


def longbench(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F1, 0 to 1."""
    return {"qa_f1_score": best_f1(results[0].strip(), doc["answers"])}


def qasper(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F1, 0 to 100. No answer counts as "Unanswerable"."""
    return {"f1": 100 * best_f1(results[0] if results[0].strip() else "Unanswerable", doc["answers"])}


def qmsum(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """ROUGE-1, 2 and L without stemming, 0 to 100; each against the summary that fits best."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGES, use_stemmer=False)
    scores = [scorer.score(answer, results[0]) for answer in doc["answers"]]
    return {name: 100 * max(score[name].fmeasure for score in scores) for name in ROUGES}
