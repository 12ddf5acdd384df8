"""What families of tasks are made of: options of the command line, and runs, which are the cells of a result table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

Record = dict[str, Any]
Labels = dict[str, int | str]
Evaluate = Callable[[Any, Any, Sequence[int], int], Iterator[Record]]


class EvalError(ValueError):
    """What stands in the way of an evaluation, in a sentence."""


def option(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    """A field of `Options` that is an argument of the command line."""
    return field(default=default, metadata={"parse": parse, "help": text})


def counts(text: str) -> tuple[int, ...]:
    """ "2,4,6" -> (2, 4, 6)."""
    return tuple(int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """ "qa1,qa2" -> ("qa1", "qa2")."""
    return tuple(part.strip() for part in text.split(","))


@dataclass(frozen=True)
class Options:
    """What the command line says about the tasks. A family reads those that it names in `takes`.

    tokenizer: a folder that AutoTokenizer reads; "" where there is none. Set by the runner.
    lengths, needles: empty for the family's own.
    """

    tokenizer: str = ""
    lengths: tuple[int, ...] = option((), counts, "context lengths in tokens, question and answer included")
    needles: tuple[int, ...] = option((), counts, "numbers of needles")
    samples: int = option(100, int, "samples in every cell of the table")
    seed: int = option(0, int, "of the samples")
    queries: int = option(1, int, "keys that a question asks for")
    values: int = option(1, int, "values, and so needles, of every key")
    keys: str = option("words", str, "kind of the needles' keys: numbers, words or uuids")
    kind: str = option("numbers", str, "kind of the needles' values: numbers, words or uuids")
    haystack: str = option(
        "prose", str, "noise, needles, prose (Python's docstrings), essays (of the hub), or a text file or folder"
    )
    answer_tokens: int = option(0, int, "room for the answer; 0 for the benchmark's own, or less in a short context")
    qa: tuple[str, ...] = option(("qa1", "qa2", "qa3", "qa4", "qa5"), names, "stories of bAbI")
    scoring: str = option("strict", str, "of BABILong: strict (the original's) or lax (the harness's)")
    babilong_hub: str = option("", str, "stories of the hub instead of ours, such as RMT-team/babilong-1k-samples")
    data_dir: str = option("", str, "folder with the files of LongBench and SCROLLS; without it, they are of the hub")
    part: str = option("held_out", str, "of 2WikiMQA and MultifieldQA: held_out (the half not for training) or all")
    max_length: int = option(0, int, "of prompts of LongBench and SCROLLS, whose middle is cut; 0 for the paper's")
    questions: int = option(0, int, "of LongBench and SCROLLS; 0 for all")
    text: str = option("", str, "documents to take losses on: a text file, or a folder written by `lucid tokenize`")


@dataclass(frozen=True)
class Run:
    """One cell of the result table: a task with all of its parameters set.

    labels: the columns that tell this cell from others: {"needles": 4, "length": 2048}.
    metric: what the score of a sample is called; for a harness task, a key of what its `process_results` gives.
    task: of the harness, in `tasks/`, or in the folder `folder` of the harness's own tasks. `metadata` reaches its
        `custom_dataset` as keyword arguments, and tells one run from another: all that the samples depend on is in it.
    answer_tokens: how many tokens are generated at most; 0 for what the task's YAML says.
    length: tokens of prompt and answer, at most; a longer prompt is an error. 0 for any. Nothing is ever truncated.
    keep: fields of a sample's document that are copied into its record, such as spans.
    evaluate: instead of a task: (model, tokenizer, indices, batch_size) -> a record for each index, with "id" (the
        index) and "score" at least. `samples` says how many indices there are.
    out_of: the best score, 1 or 100; None where less is better and there is no best, as of a loss.
    """

    labels: Labels
    metric: str
    task: str | None = None
    folder: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    answer_tokens: int = 0
    length: int = 0
    keep: tuple[str, ...] = ()
    evaluate: Evaluate | None = None
    samples: int = 0
    out_of: float | None = 1.0


@dataclass(frozen=True)
class Family:
    """A name of `--tasks`.

    about: in a line. takes: which options it reads.
    runs: its cells, for given options. Wrong options raise ValueError here, before a model is loaded.
    needs_tokenizer: False for tasks of bare tokens.
    """

    about: str
    takes: tuple[str, ...]
    runs: Callable[[Options], list[Run]]
    needs_tokenizer: bool = True


def arguments() -> list[tuple[str, Any, Callable[[str], Any], str]]:
    """Options of the command line: name, default, how it is read, what it is for."""
    told = [each for each in fields(Options) if each.metadata]
    return [(each.name, each.default, each.metadata["parse"], each.metadata["help"]) for each in told]
