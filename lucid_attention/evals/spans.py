"""Texts in tokens: how many, and which tokens hold a part of the text."""

from bisect import bisect_left, bisect_right
from functools import cache
from typing import Any

from ..models import checkpoint
from .runs import EvalError


@cache
def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a local folder, loaded once: benchmarks count the tokens of every sample."""
    try:
        return checkpoint.load_tokenizer(folder)
    except checkpoint.CheckpointError as error:
        raise EvalError(f"{error}. Give one with --tokenizer") from error


def count(tokenizer: Any, text: str) -> int:
    """Tokens of a text, special ones included, as the model gets it."""
    return len(tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=True)[0])


class Encoded:
    """Where the tokens of a text stand in it: starts and ends, in characters."""

    def __init__(self, offsets: list[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in offsets]
        self._ends = [end for _, end in offsets]

    def __len__(self) -> int:
        return len(self._starts)

    def span(self, start: int, end: int) -> list[int]:
        """[first, last + 1]: the tokens that hold characters `start` to `end`."""
        return [bisect_right(self._ends, start), bisect_left(self._starts, end)]


def encode(tokenizer: Any, text: str) -> Encoded:
    """The tokens of a text, special ones included."""
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    return Encoded(_sorted(encoded["offset_mapping"]))


def _sorted(offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Special tokens, which stand nowhere (0, 0), put where their neighbours are, so that offsets never fall."""
    last = 0
    placed = []
    for start, end in offsets:
        last = max(last, end)
        placed.append((start, end) if end > start else (last, last))
    return placed
