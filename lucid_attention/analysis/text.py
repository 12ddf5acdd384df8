"""What a model is shown: a text, a corpus or a synthetic task, as ids; and where in it the answer stands."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import DataError
from ..data.sources import open_source
from ..data.synthetic import MemoryUpdate, Needles
from .hit_rate import Query, synthetic_queries

TASKS = {"memory_update": MemoryUpdate, "needles": Needles}
# A part of a corpus that surely has enough text for any input.
PART_BYTES = 1 << 24
# No tokenizer makes less of a token on average.
BYTES_PER_TOKEN = 8


class Shown(NamedTuple):
    """ids: [1, T]; queries: who asks for what, empty if nobody; about: for the record."""

    ids: Tensor
    queries: list[Query]
    about: str


def from_text(text: str, tokenizer: Any, length: int, phrases: list[str], last: int) -> Shown:
    """A text, given or in a file: its first `length` tokens. phrases: what the last tokens should read."""
    file = Path(text) if len(text) < 4096 and "\n" not in text else None
    about = "text on the command line"
    # Path.is_file raises for a name that no file could have.
    if file is not None and os.path.isfile(file):
        text, about = file.read_text(), f"text of {file.name}"
    return _tokenized(text, about, tokenizer, length, phrases, last)


def from_source(name: str, tokenizer: Any, length: int, phrases: list[str], last: int) -> Shown:
    """The beginning of a corpus, as `lucid tokenize` reads it: stdlib, a file, a folder, a glob."""
    source = open_source(name)
    pieces: list[str] = []
    held = 0
    for part in source.parts(PART_BYTES):
        for document in source.documents(part):
            pieces.append(document.text)
            held += len(document.text)
            if held >= length * BYTES_PER_TOKEN:
                return _tokenized("\n".join(pieces), f"text of {name}", tokenizer, length, phrases, last)
    if not pieces:
        raise DataError(f"{name!r} has no text")
    return _tokenized("\n".join(pieces), f"text of {name}", tokenizer, length, phrases, last)


def _tokenized(text: str, about: str, tokenizer: Any, length: int, phrases: list[str], last: int) -> Shown:
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ids, offsets = encoded["input_ids"][:length], encoded["offset_mapping"][:length]
    if len(ids) < 2:
        raise ValueError(f"the {about} must have at least two tokens, got {len(ids)}")
    spans = tuple(span for phrase in phrases for span in find(phrase, text, offsets))
    return Shown(torch.tensor([ids]), _ask(spans, len(ids), last) if phrases else [], about)


def find(phrase: str, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, last + 1) of the tokens that hold a phrase, for every place where it stands in the tokens.

    offsets: (start, end) of every token in the text; (0, 0) of tokens that are not in it.
    """
    if not phrase:
        raise ValueError("--find must be a phrase of the text, got an empty one")
    spans = []
    at = text.find(phrase)
    while at >= 0:
        inside = [i for i, (start, end) in enumerate(offsets) if start < at + len(phrase) and end > at]
        # A phrase that is cut off by the end of the input is not there.
        if inside and offsets[inside[-1]][1] >= at + len(phrase):
            spans.append((inside[0], inside[-1] + 1))
        at = text.find(phrase, at + 1)
    if not spans:
        raise ValueError(f"--find must be a phrase of the {len(offsets)} tokens that are looked at, got {phrase!r}")
    return spans


def _ask(spans: tuple[tuple[int, int], ...], tokens: int, last: int) -> list[Query]:
    """The last tokens as queries, each with the spans that begin before it."""
    if not 1 <= last <= tokens:
        raise ValueError(f"--last must be 1 to {tokens}, the tokens there are, got {last}")
    queries = []
    for position in range(tokens - last, tokens):
        before = tuple(span for span in spans if span[0] <= position)
        if before:
            queries.append(Query(position, before))
    return queries


def from_task(name: str, length: int, seed: int, vocabulary: int) -> Shown:
    """One item of a synthetic task, with the place of every answer."""
    if name not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name](8, length, seed=seed)
    if task.vocab_size > vocabulary:
        raise ValueError(f"--task {name} has {task.vocab_size} ids, more than the {vocabulary} of the model")
    ids = task[0]["input_ids"]
    return Shown(ids[None], synthetic_queries(task, ids), f"item of {name}, seed {seed}")
