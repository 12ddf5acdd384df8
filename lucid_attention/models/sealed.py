"""Checkpoints of release 0.1, whose config.json holds the configuration under one key. Read for one release."""

import warnings
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .decoder.configuration import MODEL_TYPE, LucidConfig

KEY = "lucid_attention"
# The model_type that 0.1 wrote.
SENTENCE = (
    "This model has LUCID attention: pip install lucid-attention, then call lucid_attention.enable_lucid() before "
    "loading, or start the program with `lucid run`. `lucid convert --to softmax` makes a plain checkpoint of it"
)


def register_sealed(config_class: Callable[[str], Any]) -> None:
    """Let `AutoConfig` read such a config.json. config_class: by model_type."""

    class SealedConfig(PreTrainedConfig):
        model_type = SENTENCE

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            """The configuration inside."""
            (content,) = config_dict[KEY]
            warnings.warn(
                "this checkpoint was written by lucid-attention 0.1, and the next release will not read it: load and "
                "save it",
                FutureWarning,
                stacklevel=2,
            )
            kind = content.pop("model_type")
            content.pop("architectures", None)
            return (LucidConfig if kind == MODEL_TYPE else config_class(kind)).from_dict(content, **kwargs)

    AutoConfig.register(SENTENCE, SealedConfig, exist_ok=True)
