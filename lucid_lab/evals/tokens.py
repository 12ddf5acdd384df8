"""Tokens of a text: how many there are, and which of them hold a part of the text; loss and perplexity of a text.

Losses are in nats per token, of windows of one document each.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from lucid_attention.models import checkpoint

from ..data.text import documents

# Tokens of the longest sample, and of all samples of a task together, which are in memory at the same time.
LONGEST, MOST_TOKENS = 131_072, 1 << 30
# Seeds of evaluations are below, those of `lucid make-data` from here on: no model is trained on what it is asked.
TRAINING_SEED = 1_000_003


def check_sizes(samples: int, length: int, seed: int) -> None:
    """Refuse samples that do not fit in memory, and a seed with which evaluation and training could share samples."""
    if not 0 <= length <= LONGEST:
        raise ValueError(f"--lengths must be 0 to {LONGEST}, got {length}")
    if not 1 <= samples <= MOST_TOKENS // max(length, 1024):
        raise ValueError(f"--samples must be 1 to {MOST_TOKENS // max(length, 1024)} of {length} tokens, got {samples}")
    if not 0 <= seed < TRAINING_SEED:
        raise ValueError(f"--seed must be 0 to {TRAINING_SEED - 1}, got {seed}")


@cache
def load_tokenizer(folder: str) -> Any:
    """The tokenizer in a local folder, loaded once: every task counts tokens with it."""
    try:
        return checkpoint.load_tokenizer(folder)
    except checkpoint.CheckpointError as error:
        raise ValueError(f"{error}. Give one with --tokenizer") from error


def task_tokenizer(metadata: dict[str, Any]) -> Any:
    """The tokenizer of a task: `tokenizer` in its metadata, or `pretrained` of lm_eval's model_args."""
    folder = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(folder, str):
        raise ValueError(
            f'the task needs a tokenizer in its metadata, as in {{"tokenizer": "./model"}}, got {folder!r}'
        )
    return load_tokenizer(folder)


def count_tokens(tokenizer: Any, text: str) -> int:
    """The number of tokens that the model gets for a text, special tokens included."""
    return len(tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=True)[0])


def token_spans(tokenizer: Any, text: str, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, last + 1) of the tokens that hold the characters from `start` up to `end`, for each (start, end).

    A place must begin and end with characters that belong to tokens, which spaces may not.
    """
    encoded = tokenizer(text, return_attention_mask=False, verbose=False)
    return [(encoded.char_to_token(start), encoded.char_to_token(end - 1) + 1) for start, end in places]


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
