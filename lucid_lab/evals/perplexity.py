"""Loss and perplexity of long documents, in windows of one document each. Losses are in nats per token."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..data.text import documents
from .tokens import check_sizes, task_tokenizer


def windows(tokenizer: Any, text: str, length: int) -> Iterator[str]:
    """Consecutive windows of `length` tokens of a text."""
    offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)["offset_mapping"]
    for stop in range(length, len(offsets) + 1, length):
        yield text[offsets[stop - length][0] : offsets[stop - 1][1]]


def dataset(
    *, text: str = "", length: int = 2048, samples: int = 100, seed: int = 0, **metadata: Any
) -> dict[str, Any]:
    """The documents of `lucid_perplexity`. The arguments are the metadata of the task; length: tokens of a window."""
    from datasets import Dataset

    check_sizes(samples, length, seed)
    if not text:
        raise ValueError("--text is needed: a text, .jsonl or .parquet file, a folder, or another source of tokenize")
    if length < 2:
        raise ValueError(f"--lengths must be at least 2, got {length}")
    tokenizer, made = task_tokenizer(metadata), []
    for document in documents(text):
        for window in windows(tokenizer, document, length):
            tokens = len(tokenizer(window, add_special_tokens=False, verbose=False)["input_ids"])
            made.append({"context": "", "target": window, "tokens": tokens})
            if len(made) == samples:
                return {"test": Dataset.from_list(made)}
    if not made:
        raise ValueError(f"--text {text!r} must have a document of {length} tokens, and has none")
    return {"test": Dataset.from_list(made)}


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """The loss of a window, in nats per token."""
    loss = -results[0][0] / doc["tokens"]
    return {"loss": loss, "perplexity": loss}


def exponential_of_mean(losses: Sequence[float]) -> float:
    """The perplexity of all windows."""
    mean = math.fsum(losses) / len(losses)
    return math.exp(mean) if mean < 700 else math.inf
