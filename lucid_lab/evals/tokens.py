"""Tokens of a text: how many there are, and which of them hold a part of the text."""

from bisect import bisect_left, bisect_right
from functools import cache
from typing import Any

from lucid_attention.models import checkpoint

from .cells import EvalError


@cache
def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a local folder, loaded once: benchmarks count the tokens of every sample."""
    try:
        return checkpoint.load_tokenizer(folder)
    except checkpoint.CheckpointError as error:
        raise EvalError(f"{error}. Give one with --tokenizer") from error


def count_tokens(tokenizer: Any, text: str) -> int:
    """The number of tokens that the model gets for a text, special tokens included."""
    return len(tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=True)[0])


class EncodedText:
    """The tokens of a text. offsets: the first character and the last + 1 of every token."""

    def __init__(self, offsets: list[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in offsets]
        self._ends = [end for _, end in offsets]

    def __len__(self) -> int:
        return len(self._starts)

    def span(self, start: int, end: int) -> list[int]:
        """[first, last + 1] of the tokens that hold the characters from `start` up to `end`."""
        return [bisect_right(self._ends, start), bisect_left(self._starts, end)]


def encode(tokenizer: Any, text: str) -> EncodedText:
    """The tokens of a text, special tokens included."""
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    return EncodedText(_ascending(encoded["offset_mapping"]))


def _ascending(offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets that never fall: a special token, whose offsets are (0, 0), gets the end of the token before it."""
    last = 0
    ascending = []
    for start, end in offsets:
        last = max(last, end)
        ascending.append((start, end) if end > start else (last, last))
    return ascending
