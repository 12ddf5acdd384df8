"""A checkpoint of ours or of Transformers, opened to be looked into."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from ..models.checkpoint import check_checkpoint
from ..models.dropin.api import enable_lucid

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(folder: Path, dtype: str = "auto") -> Any:
    """The model in a local folder, with LUCID where it was saved with it."""
    check_checkpoint(folder)
    enable_lucid()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
        raise ValueError(f"{str(folder)!r} cannot be loaded: {error}") from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a local folder, which must know where its tokens stand in a text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{str(folder)!r} has no tokenizer that can be loaded ({reason}): give one with --tokenizer, or a "
            "synthetic task with --task"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"{str(folder)!r} must have a tokenizer in its fast form (tokenizer.json): give --tokenizer")
    return tokenizer


def run_name(folder: Path) -> str:
    """A name for people: of the run, where the folder is a run's `model`."""
    path = folder.resolve()
    return path.parent.name if path.name == "model" else path.name
