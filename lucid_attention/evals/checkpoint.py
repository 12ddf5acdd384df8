"""The model under evaluation: any causal model that Transformers can load, ours and drop-ins included."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..base.processes import distributed_state
from ..models.checkpoint import check_checkpoint, weight_files
from ..models.dropin.api import enable_lucid
from .cells import EvalError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class Checkpoint:
    """A local folder with config.json and weights. tokenizer: another folder that has one, None for the same."""

    folder: Path
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        try:
            check_checkpoint(self.folder)
        except ValueError as error:
            raise EvalError(str(error)) from error

    @property
    def weights(self) -> list[Path]:
        """The files of the weights, sorted."""
        return weight_files(self.folder)

    @property
    def name(self) -> str:
        """A name for people and folders: of the run, where the folder is a run's `model`."""
        path = self.folder.resolve()
        return path.parent.name if path.name == "model" else path.name

    @cached_property
    def sha256(self) -> str:
        """Of the configuration and the content of the weights: two steps of one training differ in nothing else."""
        digest = hashlib.sha256()
        for path in (self.folder / "config.json", *self.weights):
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return digest.hexdigest()

    def tokenizer_folder(self) -> str:
        """Where the tokenizer is, or what to do without one."""
        folder = self.tokenizer or self.folder
        if not any((folder / name).is_file() for name in TOKENIZERS):
            raise EvalError(
                f"{str(folder)!r} has no tokenizer ({', '.join(TOKENIZERS[:2])}): give one with --tokenizer"
            )
        return str(folder)

    def load(self, dtype: str = "auto") -> Any:
        """The model, on this process's device, ready to be asked."""
        enable_lucid()
        try:
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)
        except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            raise EvalError(f"{str(self.folder)!r} cannot be loaded: {error}") from error
        return model.to(distributed_state().device).eval()

    def describe(self) -> dict[str, Any]:
        """What a result says about the model that it is of."""
        enable_lucid()
        try:
            config = AutoConfig.from_pretrained(self.folder).get_text_config(decoder=True)
        except (ValueError, TypeError, KeyError, OSError, json.JSONDecodeError) as error:
            raise EvalError(f"{str(self.folder)!r} cannot be read: {error}") from error
        return {
            "name": self.name,
            "path": str(self.folder),
            "sha256": self.sha256,
            "model_type": config.model_type,
            "attention": getattr(config, "attention", None) or getattr(config, "_attn_implementation", None),
        }


def dtypes() -> tuple[str, ...]:
    """Names for --dtype."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return ("auto", *(str(each).removeprefix("torch.") for each in known))
