"""The families of tasks: the names that `lucid eval --tasks` knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lucid_attention.messages import did_you_mean

from .benchmarks import babilong, longqa, needles, perplexity, recall, ruler
from .cells import Cell, EvalError, Options

SAMPLED = ("lengths", "samples", "seed")
LONG_QA = ("data_dir", "max_length", "questions", "answer_tokens")


@dataclass(frozen=True)
class Family:
    """A name of `--tasks`.

    about: one line for the listing.
    takes: the options that it reads.
    cells: its cells for given options. It raises ValueError for wrong options, before a model is loaded.
    needs_tokenizer: False for tasks of bare tokens.
    """

    about: str
    takes: tuple[str, ...]
    cells: Callable[[Options], list[Cell]]
    needs_tokenizer: bool = True


FAMILIES: dict[str, Family] = {
    "sniah": Family(
        "a needle in a haystack: the mean of RULER's niah_single 1 to 3",
        (*SAMPLED, "variants", "haystack", "answer_tokens"),
        needles.single,
    ),
    "mniah": Family(
        "N needles in a haystack: the mean of RULER's niah_multikey 1 to 3, multivalue and multiquery",
        (*SAMPLED, "needles", "variants", "haystack", "answer_tokens"),
        needles.multiple,
    ),
    "ruler": Family("RULER's variable tracking, common words and frequent words", SAMPLED, ruler.cells),
    "babilong": Family(
        "stories of bAbI, QA1 to QA5, hidden in a long text",
        (*SAMPLED, "qa", "haystack", "scoring", "babilong_hub", "answer_tokens"),
        babilong.cells,
    ),
    "longbench": Family(
        "LongBench: 2WikiMQA, HotpotQA, MultifieldQA (F1, 0–1); from the hub or --data-dir",
        ("part", *LONG_QA),
        longqa.longbench,
    ),
    "scrolls": Family(
        "SCROLLS: Qasper (F1), QMSum (ROUGE), 0–100; from the hub or --data-dir", LONG_QA, longqa.scrolls
    ),
    "perplexity": Family("loss on long documents, by position", (*SAMPLED, "text"), perplexity.by_position),
    "context_loss": Family(
        "loss of the same tokens after contexts of many lengths", (*SAMPLED, "text"), perplexity.by_context
    ),
    "recall": Family(
        "bare tokens: values of 2 to 16 keys among fillers, for checkpoints of `lucid train tiny_needle`",
        (*SAMPLED, "needles"),
        recall.needles,
        needs_tokenizer=False,
    ),
    "memory_update": Family(
        "bare tokens: the latest value of a key, for checkpoints trained with --data memory_update",
        (*SAMPLED, "needles"),
        recall.memory_update,
        needs_tokenizer=False,
    ),
}


def find_families(names: Sequence[str]) -> dict[str, Family]:
    """The families with these names."""
    for name in names:
        if name not in FAMILIES:
            raise EvalError(f"there is no task {name!r}{did_you_mean(name, FAMILIES)}: {', '.join(FAMILIES)}, or list")
    return {name: FAMILIES[name] for name in names}
