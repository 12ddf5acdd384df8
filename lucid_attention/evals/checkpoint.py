"""The model under evaluation: any causal model that Transformers can load, ours and drop-ins included."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.processes import distributed_state
from ..models.checkpoint import check_checkpoint, checkpoint_name, load_config, load_model, weight_files


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
        """Hash of the configurations of the model and of its generation, and of the weights."""
        digest = hashlib.sha256()
        configurations = (self.folder / name for name in ("config.json", "generation_config.json"))
        for path in (*filter(Path.is_file, configurations), *weight_files(self.folder)):
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return digest.hexdigest()

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
