"""Losses on long documents: of whole windows of text, and of the same tokens after contexts of many lengths.

Losses are in nats per token; the perplexity is the exponential of their mean. A window is of one document.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .haystacks import read_texts
from .tokens import check_sizes, task_tokenizer

# The number of tokens that are predicted after every context.
TARGETS = 256


def windows(tokenizer: Any, text: str, length: int, context: int) -> Iterator[tuple[str, str]]:
    """Consecutive windows of `length` tokens of a text: the `context` tokens before its last tokens, and those."""
    offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)["offset_mapping"]
    targets = length if not context else TARGETS
    for stop in range(length, len(offsets) + 1, length):
        start = offsets[stop - targets][0]
        first = offsets[stop - targets - context][0]
        yield text[first:start], text[start : offsets[stop - 1][1]]


def _count(tokenizer: Any, text: str, special: bool = True) -> int:
    return len(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _document(tokenizer: Any, context: str, target: str) -> dict[str, Any]:
    """The context and its continuation, cut and counted as the harness does it: it moves spaces to the continuation."""
    stripped = context.rstrip()
    if not stripped:
        return {"context": "", "target": context + target, "tokens": _count(tokenizer, context + target, False)}
    target = context[len(stripped) :] + target
    tokens = _count(tokenizer, stripped + target) - _count(tokenizer, stripped)
    return {"context": stripped, "target": target, "tokens": tokens}


def dataset(
    *,
    text: str = "",
    length: int = 2048,
    longest: int = 0,
    samples: int = 100,
    seed: int = 0,
    **metadata: Any,
) -> dict[str, Any]:
    """The documents of `lucid_perplexity` and `lucid_context_loss`. The arguments are the metadata of the task.

    length: tokens of a window, or with `longest` tokens of the context. longest: the longest context, so that all
    contexts have the same targets; 0 for the loss of whole windows.
    """
    from datasets import Dataset

    check_sizes(samples, max(length, longest), seed)
    if not text:
        raise ValueError("--text is needed: a text file, a .jsonl or .parquet file with a column text, or a folder")
    if not text.startswith("hf:") and not Path(text).exists():
        raise ValueError(f"--text must be a text file or folder, or hf:NAME, got {text!r}, which does not exist")
    if (length < 2 and not longest) or length < 1:
        raise ValueError(f"--lengths must be at least {1 if longest else 2}, got {length}")
    tokenizer, documents = task_tokenizer(metadata), []
    size = longest + TARGETS if longest else length
    for document in read_texts(text, "--text"):
        for context, target in windows(tokenizer, document, size, length if longest else 0):
            documents.append(_document(tokenizer, context, target))
            if len(documents) == samples:
                return {"test": Dataset.from_list(documents)}
    if not documents:
        raise ValueError(f"--text {text!r} must have a document of {size} tokens, and has none")
    return {"test": Dataset.from_list(documents)}


def context_dataset(*, length: int = 2048, longest: int = 0, **metadata: Any) -> dict[str, Any]:
    """The documents of `lucid_context_loss`."""
    return dataset(length=length, longest=max(length, longest), **metadata)


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """The loss of a window, in nats per token."""
    loss = -results[0][0] / doc["tokens"]
    return {"loss": loss, "perplexity": loss}


def exponential_of_mean(losses: Sequence[float]) -> float:
    """The perplexity of all windows."""
    mean = math.fsum(losses) / len(losses)
    return math.exp(mean) if mean < 700 else math.inf
