"""The model under evaluation: any causal model that Transformers can load, ours and drop-ins included."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lucid_attention.models.checkpoint import (
    check_checkpoint,
    checkpoint_name,
    checkpoint_sha256,
    load_config,
    load_model,
)

from ..processes import distributed_state


@dataclass(frozen=True)
class Checkpoint:
    """A local folder with config.json and weights. tokenizer: another folder that has one, None for the same."""

    folder: Path
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.folder)

    @property
    def name(self) -> str:
        """A name for tables and folders."""
        return checkpoint_name(self.folder)

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that its answers depend on, without the tokenizer."""
        return checkpoint_sha256(self.folder)

    @property
    def tokenizer_folder(self) -> str:
        """The folder that has the tokenizer."""
        return str(self.tokenizer or self.folder)

    def load(self, dtype: str = "auto") -> Any:
        """The model, on this process's device, in evaluation mode."""
        return load_model(self.folder, dtype).to(distributed_state().device)

    def describe(self) -> dict[str, Any]:
        """The description of the model that results are stored with."""
        config = load_config(self.folder).get_text_config(decoder=True)
        return {
            "name": self.name,
            "path": str(self.folder),
            "sha256": self.sha256,
            "model_type": config.model_type,
            "attention": getattr(config, "attention", None) or getattr(config, "_attn_implementation", None),
        }
