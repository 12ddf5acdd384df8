"""Tokens of a text: how many there are, and which of them hold a part of the text."""

from functools import cache
from typing import Any

from lucid_attention.models import checkpoint

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
