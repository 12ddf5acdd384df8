"""The input of an analysis as ids, with the places of its answers: a text, a corpus, a synthetic task or samples."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lucid_attention.files import parse_json, read_text

from ..data import DataError
from ..data.synthetic import MemoryUpdate, Needles
from ..data.text import documents
from .hit_rate import Query, synthetic_queries

# Suffixes of files with text, and the signs between the folders of a path.
SUFFIXES = (".txt", ".text", ".md", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".html", ".xml", ".log", ".tex", ".py")
SLASHES = {"/", os.sep}
TASKS = {"memory_update": MemoryUpdate, "needles": Needles}
# Characters to read per token: above the average of any tokenizer.
CHARACTERS_PER_TOKEN = 8


class ModelInput(NamedTuple):
    """ids: [1, T]; queries: tokens that ask and the places of their answers, may be empty; about: a description."""

    ids: Tensor
    queries: list[Query]
    about: str


def from_text(text: str, tokenizer: Any, length: int, phrases: list[str], last: int) -> ModelInput:
    """The first `length` tokens of a text or text file. phrases: for the last `last` tokens to read."""
    about = "text on the command line"
    if is_file(text):
        text, about = read_text(Path(text)), f"text of {Path(text).name}"
    return _tokenized(text, about, tokenizer, length, phrases, last)


def is_file(text: str) -> bool:
    """Whether the value of --text names a file. What looks like the name of a file must be one.

    A line looks like one if it ends with a suffix of text files, or has a slash and no space.
    """
    # os.path, because Path raises for names that no file can have.
    if os.path.isdir(text):
        raise ValueError(f"--text must be a text or a file, got the folder {text!r}, which --tokens-from can read")
    # Pipes and devices, too: reading refuses them by name.
    if os.path.exists(text):
        return True
    one_line = len(text.splitlines()) == 1
    has_path = any(slash in text for slash in SLASHES) and not any(map(str.isspace, text))
    if one_line and (text.lower().endswith(SUFFIXES) or has_path):
        raise ValueError(
            f"--text must be a text or a file that exists, got {text!r}, which looks like a file and is none. To "
            "analyse these words themselves, put a line break behind them"
        )
    return False


def from_source(name: str, tokenizer: Any, length: int, phrases: list[str], last: int) -> ModelInput:
    """The first `length` tokens of a corpus that `lucid tokenize` reads: stdlib, a file, a folder, a glob."""
    pieces: list[str] = []
    characters = 0
    for document in documents(name):
        pieces.append(document)
        characters += len(document)
        if characters >= length * CHARACTERS_PER_TOKEN:
            return _tokenized("\n".join(pieces), f"text of {name}", tokenizer, length, phrases, last)
    if not pieces:
        raise DataError(f"{name!r} has no text")
    return _tokenized("\n".join(pieces), f"text of {name}", tokenizer, length, phrases, last)


def _tokenized(text: str, about: str, tokenizer: Any, length: int, phrases: list[str], last: int) -> ModelInput:
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ids, offsets = encoded["input_ids"][:length], encoded["offset_mapping"][:length]
    if len(ids) < 2:
        raise ValueError(f"the {about} must have at least two tokens, got {len(ids)}")
    spans = tuple(span for phrase in phrases for span in find(phrase, text, offsets))
    return ModelInput(torch.tensor([ids]), _ask(spans, len(ids), last) if phrases else [], about)


def find(phrase: str, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, last + 1) of the tokens that hold a phrase, for every occurrence of the phrase.

    offsets: (start, end) of every token in the text; (0, 0) for special tokens.
    """
    if not phrase:
        raise ValueError("--find must be a phrase of the text, got an empty one")
    spans = []
    at = text.find(phrase)
    while at >= 0:
        inside = [i for i, (start, end) in enumerate(offsets) if start < at + len(phrase) and end > at]
        # Leave out a phrase that the end of the input cuts off.
        if inside and offsets[inside[-1]][1] >= at + len(phrase):
            spans.append((inside[0], inside[-1] + 1))
        at = text.find(phrase, at + 1)
    if not spans:
        raise ValueError(f"--find must be a phrase of the {len(offsets)} tokens that are analysed, got {phrase!r}")
    return spans


def _ask(spans: tuple[tuple[int, int], ...], tokens: int, last: int) -> list[Query]:
    """The last tokens as queries, each with the spans that begin before it."""
    if not 1 <= last <= tokens:
        raise ValueError(f"--last must be 1 to {tokens}, the number of tokens, got {last}")
    queries = []
    for position in range(tokens - last, tokens):
        before = tuple(span for span in spans if span[0] <= position)
        if before:
            queries.append(Query(position, before))
    return queries


def from_task(name: str, length: int, seed: int, vocabulary: int) -> ModelInput:
    """One item of a synthetic task, with the places of its answers."""
    if name not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name](8, length, seed=seed)
    if task.vocab_size > vocabulary:
        raise ValueError(f"--task {name} has {task.vocab_size} ids, more than the {vocabulary} of the model")
    ids = task[0]["input_ids"]
    return ModelInput(ids[None], synthetic_queries(task, ids), f"item of {name}, seed {seed}")


def read_samples(file: Path, limit: int) -> list[dict[str, Any]]:
    """The first `limit` samples of `lucid make-data needles`: {"prompt": text, "spans": of the answer in tokens}."""
    samples = []
    for number, line in enumerate(read_text(file).splitlines()[:limit], 1):
        try:
            sample = parse_json(line, str(file))
            spans = [(int(first), int(stop)) for first, stop in sample["answer_spans"]]
            samples.append({"prompt": str(sample["prompt"]), "spans": tuple(spans)})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}, line {number}: expected a prompt and its answer_spans, as `lucid make-data needles` writes "
                f"them, got {line[:60]!r}"
            ) from error
    if not samples:
        raise ValueError(f"--samples must hold at least one sample, got none in {file}")
    return samples
