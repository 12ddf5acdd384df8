"""How a LUCID model is written into config.json: programs that do not know LUCID cannot read the file as another model.

LUCID has no weights of its own. A program that took the file for a plain Llama would compute softmax attention without
a word. So the configuration lies under one key, and a sentence stands where such programs look first.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from ..files import read_json

# The configuration is the one element of a list: Transformers searches dictionaries in the file for a model type.
KEY = "lucid_attention"
SENTENCE = (
    "This model has LUCID attention: pip install lucid-attention, then call lucid_attention.enable_lucid() before "
    "loading. `lucid convert --to softmax` makes a plain checkpoint of it"
)
# Sizes without which no program makes a model. A concrete class of Transformers does not look at model_type. Not
# vocab_size, with which Transformers compares token ids where it opens a tokenizer: that needs no LUCID.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# Programs that take the configuration from Transformers and read the weights themselves, by the name of their package
# or script. In a process that knows LUCID they would get the configuration of a plain model.
WEIGHT_READERS = ("convert_hf_to_gguf", "ctranslate2", "lmdeploy", "sglang", "tensorrt_llm")
# Older checkpoints are plain files with this attn_implementation, or with a dictionary of it by the names of parts.
OLD_MARK = "lucid (pip install lucid-attention, and call lucid_attention.enable_lucid() before loading)"


def seal(config: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json for this configuration."""
    # Read by Transformers itself: token ids if generation_config.json is missing, and the places of code (auto_map).
    needed = {*GenerationConfig().to_dict(), "transformers_version", "auto_map"}
    outside = {key: value for key, value in config.items() if key in needed}
    # A composite configuration has its sizes in its parts, and defaults for parts that are missing.
    parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    sentences = {"model_type": SENTENCE, "architectures": [SENTENCE], **dict.fromkeys([*SIZES, *parts], SENTENCE)}
    return {**outside, **sentences, KEY: [config]}


def unseal(content: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the content of a config.json, which may be of a model without LUCID."""
    if KEY not in content:
        return _without_old_mark(content)
    inside = content[KEY]
    if not (isinstance(inside, list) and len(inside) == 1 and isinstance(inside[0], dict)):
        raise ValueError(f"{KEY!r} in config.json must be a list of one configuration, got {type(inside).__name__}")
    return dict(inside[0])


def is_sealed(folder: str | Path) -> bool:
    """Whether this is a local folder with the checkpoint of a LUCID model."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return False
    content = json.loads(file.read_text(encoding="utf-8"))
    return isinstance(content, dict) and unseal(content) is not content


def refuse_weight_readers() -> None:
    """Refuse the configuration of a LUCID model to a program in WEIGHT_READERS, if one of them asks for it."""
    frame = sys._getframe(1)
    while frame is not None:
        names = {frame.f_globals.get("__name__", "").partition(".")[0], Path(frame.f_code.co_filename).stem}
        for reader in names.intersection(WEIGHT_READERS):
            raise ValueError(
                f"{reader} cannot open a model with LUCID attention: it reads the weights itself, and would compute "
                "softmax attention with them. `lucid convert --to softmax` makes a plain checkpoint"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _without_old_mark(content: dict[str, Any]) -> dict[str, Any]:
    mark = content.get("attn_implementation")
    marked = [name for name, value in mark.items() if value == OLD_MARK] if isinstance(mark, dict) else []
    if mark != OLD_MARK and not marked:
        return content
    content = {key: value for key, value in content.items() if key != "attn_implementation"}
    for part in [content] if mark == OLD_MARK else [content[name] for name in marked]:
        if part.get("lucid") is None:
            part["lucid"] = {}
    return content


def write_sealed(config: Any, file: Any, use_diff: bool = True) -> None:
    """`PreTrainedConfig.to_json_file` for a configuration with LUCID."""
    content = seal(json.loads(config.to_json_string(use_diff=use_diff)))
    Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The place of a class in a checkpoint, and the whole of it. Transformers checks what it imports, and names the package.
CODE_FILE = "lucid_checkpoint.py"
CODE = '''"""Opens this checkpoint in programs that pass trust_remote_code=True, with the package lucid-attention."""

from lucid_attention import enable_lucid
from transformers import AutoConfig, PreTrainedConfig


class LucidCheckpoint(PreTrainedConfig):
    """Stands in config.json for the configuration of the model."""

    @classmethod
    def from_pretrained(cls, folder, **kwargs):
        """The configuration of the model."""
        enable_lucid()
        return AutoConfig.from_pretrained(folder, **{**kwargs, "trust_remote_code": False})
'''


def add_auto_map(folder: Path) -> None:
    """Let programs open the checkpoint in this folder with trust_remote_code=True.

    The entry stands beside the configuration: this package does not read it, and models saved later do not have it.
    """
    (folder / CODE_FILE).write_text(CODE, encoding="utf-8")
    file = folder / "config.json"
    content = read_json(file)
    assert KEY in content, "only a checkpoint with LUCID needs the package"
    content = {"auto_map": {"AutoConfig": f"{Path(CODE_FILE).stem}.LucidCheckpoint"}, **content}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
