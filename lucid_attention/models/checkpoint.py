"""The one module that opens a checkpoint folder: configuration, model, tokenizer. It never runs the folder's code."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..base.messages import first_line
from .dropin.api import enable_lucid

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# The exceptions of Transformers for a folder that it cannot read.
UNREADABLE = (ValueError, TypeError, KeyError, OSError, RuntimeError, SafetensorError)
# Some messages of Transformers list every model that it knows.
LONGEST_REASON = 400


class CheckpointError(ValueError):
    """Why a folder cannot be used as a checkpoint, in a sentence."""


def check_checkpoint(folder: Path) -> None:
    """Refuse anything but a local folder with config.json and weights."""
    if folder.is_file():
        raise CheckpointError(f"CHECKPOINT must be a folder with config.json and weights, got the file {str(folder)!r}")
    if not folder.is_dir():
        raise CheckpointError(
            f"CHECKPOINT must be a local folder, got {str(folder)!r}, which is not one. A model of the hub can be "
            f"fetched with: hf download {folder} --local-dir FOLDER"
        )
    if not (folder / "config.json").is_file():
        model = folder / "model"
        hint = f". Did you mean {str(model)!r}?" if (model / "config.json").is_file() else ""
        raise CheckpointError(f"CHECKPOINT must hold a config.json, which {str(folder)!r} does not{hint}")
    if not weight_files(folder):
        raise CheckpointError(f"CHECKPOINT must hold weights ({', '.join(WEIGHTS)}), which {str(folder)!r} does not")


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights, sorted."""
    return sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))


def checkpoint_name(folder: Path) -> str:
    """The folder's name, or the run's where the folder is the `model` of a run."""
    path = folder.resolve()
    return path.parent.name if path.name == "model" else path.name


def load_config(folder: str | Path) -> Any:
    """The configuration in a local folder."""
    enable_lucid()
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{str(folder)!r} has a config.json that cannot be read: {short_reason(error)}"
        ) from error


def load_model(folder: str | Path, dtype: str | torch.dtype = "auto", *, config: Any = None) -> Any:
    """The causal model in a local folder, in evaluation mode, with LUCID if it was saved with LUCID.

    dtype: one of `DTYPES`, or a torch dtype. config: instead of the folder's own.
    """
    check_checkpoint(Path(folder))
    enable_lucid()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, trust_remote_code=False)
    except UNREADABLE as error:
        raise CheckpointError(f"{str(folder)!r} cannot be loaded: {short_reason(error)}") from error


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a local folder, in its fast form, which knows the place of every token in a text."""
    if not Path(folder).is_dir():
        raise CheckpointError(f"the folder of a tokenizer must be local, got {str(folder)!r}, which is not a folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # AutoTokenizer passes on errors of the libraries that read the files, which have no common base class.
    except Exception as error:
        raise CheckpointError(f"{str(folder)!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    if not tokenizer.is_fast or not tokenizer.backend_tokenizer.encode("The quick brown fox.").ids:
        raise CheckpointError(f"{str(folder)!r} must have a tokenizer in its fast form (tokenizer.json)")
    return tokenizer


def short_reason(error: BaseException) -> str:
    """The message of an error, cut where it is very long."""
    text = str(error)
    return text if len(text) < LONGEST_REASON else text[:LONGEST_REASON] + " ..."
