"""The options of `lucid eval`, and the cells of a result table that a family of tasks makes from them."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

# Tokens of the longest sample; most samples of a cell; and tokens of a cell, whose prompts are in memory together.
LONGEST, MOST_SAMPLES, MOST_TOKENS = 131_072, 100_000, 1 << 30
# Seeds of evaluations are below, those of `lucid make-data` from here on: no model is trained on what it is asked.
TRAINING_SEED = 1_000_003

Record = dict[str, Any]
Labels = dict[str, int | str]
Evaluate = Callable[[Any, Any, Sequence[int], int], Iterator[Record]]


class EvalError(ValueError):
    """Why an evaluation cannot run, in a sentence."""


def option(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    """A field of `Options` that is an argument of the command line."""
    return field(default=default, metadata={"parse": parse, "help": text})


def counts(text: str) -> tuple[int, ...]:
    """ "2,4,6" -> (2, 4, 6)."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """ "qa1,qa2" -> ("qa1", "qa2")."""
    return tuple(part.strip() for part in text.split(","))


def ranges(text: str) -> tuple[tuple[int, int], ...]:
    """ "2048-8192,2048-32768" -> ((2048, 8192), (2048, 32768))."""
    pairs = [part.partition("-") for part in text.split(",")]
    return tuple((int(first), int(last)) for first, _, last in pairs)


@dataclass(frozen=True)
class Options:
    """The options of all families. A family reads the options that its `takes` names.

    tokenizer: a folder that AutoTokenizer reads, set by the runner; "" for families that need no tokenizer.
    lengths, needles: () for the family's defaults.
    """

    tokenizer: str = ""
    lengths: tuple[int, ...] = option((), counts, "context lengths in tokens, question and answer included")
    needles: tuple[int, ...] = option((), counts, "numbers of needles")
    samples: int = option(100, int, "samples in every cell of the table")
    seed: int = option(0, int, "seed of the samples")
    variants: tuple[str, ...] = option(
        (), names, "tasks of sniah and mniah, RULER's names without niah_, as in multikey_1,multivalue; without it, all"
    )
    haystack: str = option(
        "prose",
        str,
        "noise, needles, prose (Python's docstrings), essays or pg19 (from the hub), or a text file or folder",
    )
    answer_tokens: int = option(
        0, int, "tokens for the answer; 0 for the benchmark's own number, or less in a short context"
    )
    qa: tuple[str, ...] = option(("qa1", "qa2", "qa3", "qa4", "qa5"), names, "stories of bAbI")
    scoring: str = option("strict", str, "BABILong's score: strict (the original's) or lax (the harness's)")
    babilong_hub: str = option(
        "",
        str,
        "published samples on PG19 instead of ours: RMT-team/babilong-1k-samples, or a folder with its data/",
    )
    data_dir: str = option("", str, "folder with the files of LongBench and SCROLLS; without it, the hub's are read")
    part: str = option(
        "held_out", str, "part of 2WikiMQA and MultifieldQA: held_out (the half not for training) or all"
    )
    max_length: int = option(
        0,
        int,
        "tokens of prompt and answer in LongBench and SCROLLS; a longer prompt loses its middle; 0 for the paper's",
    )
    questions: int = option(0, int, "questions of LongBench and SCROLLS; 0 for all")
    text: str = option("", str, "documents to take losses on: a text file, or a folder written by `lucid tokenize`")

    def __post_init__(self) -> None:
        check_sizes(self.samples, self.lengths)
        check_seed(self.seed)
        if self.questions < 0:
            raise EvalError(f"--questions must not be negative, got {self.questions}")
        for name, value in (("needles", max(self.needles, default=0)), ("answer-tokens", self.answer_tokens)):
            if value > LONGEST:
                raise EvalError(f"--{name} must be at most {LONGEST}, the tokens of the longest sample, got {value}")


def check_seed(seed: int) -> None:
    """Refuse a seed with which evaluation and training could share samples."""
    if not 0 <= seed < TRAINING_SEED:
        raise EvalError(f"--seed must be 0 to {TRAINING_SEED - 1}, got {seed}")


def check_sizes(samples: int, lengths: Sequence[int]) -> None:
    """Refuse samples that would not be made in any time, or do not fit into memory."""
    longest = max(lengths, default=0)
    if longest > LONGEST:
        raise EvalError(f"--lengths must be at most {LONGEST}, got {longest}")
    if samples > MOST_SAMPLES:
        raise EvalError(f"--samples must be at most {MOST_SAMPLES}, got {samples}")
    if samples * longest > MOST_TOKENS:
        raise EvalError(
            f"--samples {samples} of --lengths {longest} must have at most {MOST_TOKENS} tokens together, which fit "
            f"into memory, got {samples * longest}"
        )


def arguments() -> list[tuple[str, Any, Callable[[str], Any], str]]:
    """The options of the command line: name, default, parser, help text."""
    return [
        (option.name, option.default, option.metadata["parse"], option.metadata["help"])
        for option in fields(Options)
        if option.metadata
    ]


@dataclass(frozen=True)
class Cell:
    """One cell of the result table: a task with all of its parameters set.

    labels: tell this cell from the others of its family: {"needles": 4, "length": 2048}.
    metric: the name of a sample's score; for a harness task, a key of the dictionary from its `process_results`.
    task: the name of a harness task in `benchmarks/harness_tasks`.
    metadata: keyword arguments of the task's `custom_dataset`. It holds everything that the samples depend on, so
        that two cells with different samples have different names.
    answer_tokens: most tokens of an answer; 0 for the number in the task's YAML.
    length: most tokens of prompt and answer; 0 for any. A longer prompt is an error: no prompt is truncated.
    keep: fields of a sample's document that are copied into its record, such as spans.
    evaluate: asks the samples, instead of the harness: (model, tokenizer, indices, batch_size) -> one record for each
        index, with at least "id" (the index) and "score".
    samples: the number of indices for `evaluate`.
    out_of: the best score, 1 or 100; None for a loss, which has no best value and of which less is better.
    """

    labels: Labels
    metric: str
    task: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    answer_tokens: int = 0
    length: int = 0
    keep: tuple[str, ...] = ()
    evaluate: Evaluate | None = None
    samples: int = 0
    out_of: float | None = 1.0

    def settings(
        self, family: str, limit: int | None, dtype: str, tokenizer_sha256: str, harness: str
    ) -> dict[str, Any]:
        """Everything beside the checkpoint that the samples of this cell and their scores depend on.

        The tokenizer's hash replaces its folder, so that a copy in another folder gives the same cell. Batch size,
        processes and device are left out: they change the last bits of a number, no setting of the cell.
        harness: the version of the harness and its tasks.
        """
        return {
            "family": family,
            "task": self.task,
            "labels": self.labels,
            "metric": self.metric,
            "metadata": {name: value for name, value in self.metadata.items() if name != "tokenizer"},
            "answer_tokens": self.answer_tokens,
            "limit": limit,
            "dtype": dtype,
            "tokenizer_sha256": tokenizer_sha256,
            "harness": harness if self.task else "",
        }


def cell_name(settings: dict[str, Any]) -> str:
    """A readable file name that differs for different settings."""
    labels = "-".join(f"{name}_{value}" for name, value in settings["labels"].items())
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{settings['family']}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', labels)}-{digest[:8]}"
