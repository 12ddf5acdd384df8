"""The one module that opens a checkpoint folder: configuration, model, tokenizer. It never runs the folder's code."""

import hashlib
import math
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..files import is_device, read_json
from ..messages import first_line
from .decoder.configuration import MOST_LAYERS
from .subclasses import enable_lucid

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Files that must hold a JSON object where they are there. Transformers takes some other contents for none.
OBJECTS = ("config.json", "generation_config.json", "*.index.json")
TOKENIZER_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Some messages of Transformers list every model that it knows.
LONGEST_REASON = 400


class CheckpointError(ValueError):
    """Why a folder cannot be used as a checkpoint, in a sentence."""


def check_checkpoint(folder: Path) -> None:
    """Refuse anything but a local folder with config.json and weights. Damage is searched where that takes no time."""
    if folder.is_file():
        raise CheckpointError(f"CHECKPOINT must be a folder with config.json and weights, got the file {str(folder)!r}")
    if not folder.is_dir():
        name = folder if len(folder.parts) == 2 and not folder.is_absolute() else "OWNER/NAME"
        raise CheckpointError(
            f"CHECKPOINT must be a local folder, got {str(folder)!r}, which is not one. A model of the hub can be "
            f"fetched with: hf download {name} --local-dir FOLDER"
        )
    if devices := [path for path in folder.iterdir() if is_device(path)]:
        raise CheckpointError(f"CHECKPOINT must hold files, got the pipe or device {str(devices[0])!r}")
    if not (folder / "config.json").is_file():
        model = folder / "model"
        hint = f". Did you mean {str(model)!r}?" if (model / "config.json").is_file() else ""
        raise CheckpointError(f"CHECKPOINT must hold a config.json, which {str(folder)!r} does not{hint}")
    if not weight_files(folder):
        raise CheckpointError(f"CHECKPOINT must hold weights ({', '.join(WEIGHTS)}), which {str(folder)!r} does not")
    _check_objects(folder, OBJECTS)
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged weights: {first_line(error)}") from error


def _check_objects(folder: Path, patterns: tuple[str, ...]) -> None:
    for file in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        try:
            content = read_json(file)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        for part in (content, *content.values()):
            layers = part.get("num_hidden_layers") if isinstance(part, dict) else 0
            if isinstance(layers, int) and layers > MOST_LAYERS:
                raise CheckpointError(f"{file}: num_hidden_layers must be at most {MOST_LAYERS}, got {layers}")
        files = content.get("weight_map", {}) if file.name.endswith(".index.json") else {}
        if not isinstance(files, dict) or not all(_is_name(name) for name in files.values()):
            raise CheckpointError(f"{file}: weight_map must map names of weights to names of files in the same folder")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights, sorted."""
    return sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))


def checkpoint_sha256(folder: Path) -> str:
    """Hash of the configurations and the weights: two steps of one training differ in nothing else."""
    digest = hashlib.sha256()
    # generation_config.json holds the tokens that end an answer.
    configs = [folder / name for name in ("config.json", "generation_config.json") if (folder / name).is_file()]
    for path in (*configs, *weight_files(folder)):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def checkpoint_name(folder: Path) -> str:
    """The folder's name, or the run's where the folder is the `model` of a run."""
    path = folder.resolve()
    return path.parent.name if path.name == "model" else path.name


def load_config(folder: str | Path) -> Any:
    """The configuration in a local folder."""
    enable_lucid()
    _check_objects(Path(folder), OBJECTS)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Transformers passes on errors of the libraries that read the files, which have no common base class.
    except Exception as error:
        raise CheckpointError(
            f"{str(folder)!r} has a config.json that cannot be read: {short_reason(error)}"
        ) from error


def load_skeleton(folder: str | Path) -> Any:
    """The causal model in a local folder without its weights: shapes alone."""
    config = load_config(folder)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # As above.
    except Exception as error:
        raise CheckpointError(f"{str(folder)!r} cannot be loaded: {short_reason(error)}") from error


def load_model(folder: str | Path, dtype: str | torch.dtype = "auto", *, config: Any = None) -> Any:
    """The causal model in a local folder, in evaluation mode, with LUCID if it was saved with LUCID.

    dtype: one of `DTYPES`, or a torch dtype. config: instead of the folder's own; weights that only the model of this
    configuration has are new. Without it, a folder that lacks some weights is refused.
    """
    check_checkpoint(Path(folder))
    enable_lucid()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    # As above.
    except Exception as error:
        raise CheckpointError(f"{str(folder)!r} cannot be loaded: {short_reason(error)}") from error
    if config is None:
        _check_names(model, folder, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]))
    _check_finite(model, folder)
    return model


def _check_names(model: Any, folder: str | Path, missing: list[str], unexpected: list[str]) -> None:
    """Refuse a folder that lacks weights of its model, or has more layers than its configuration says."""
    if missing:
        raise CheckpointError(
            f"{str(folder)!r} must hold all weights of its model, and lacks {len(missing)}, among them {missing[0]}"
        )
    # Other weights that a model does not use, such as heads for training, are left alone.
    layer = re.compile(rf"{re.escape(model.base_model_prefix)}\.(layers|h|blocks)\.\d+\.")
    if beyond := [name for name in unexpected if layer.match(name)]:
        raise CheckpointError(
            f"{str(folder)!r} has a config.json with fewer layers than its weights, among them {beyond[0]}"
        )


def _check_finite(model: Any, folder: str | Path) -> None:
    """Refuse weights that are no numbers, as a training that diverged leaves them."""
    for name, weight in model.named_parameters():
        # Eight bits are those of quantized weights.
        if not weight.is_floating_point() or weight.itemsize == 1 or not weight.numel():
            continue
        if not all(math.isfinite(end.item()) for end in torch.aminmax(weight.detach())):
            raise CheckpointError(f"{str(folder)!r} must hold finite weights, got others in {name}")


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a local folder, in its fast form, which knows the place of every token in a text."""
    if not Path(folder).is_dir():
        raise CheckpointError(f"the folder of a tokenizer must be local, got {str(folder)!r}, which is not a folder")
    _check_objects(Path(folder), TOKENIZER_OBJECTS)
    # Transformers reads config.json too, and warns of a model type that it does not know.
    enable_lucid()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # As above.
    except Exception as error:
        raise CheckpointError(
            f"{str(folder)!r} has no tokenizer that can be loaded: {short_reason(error).splitlines()[0]}"
        ) from error
    if not tokenizer.is_fast or not tokenizer.backend_tokenizer.encode("The quick brown fox.").ids:
        raise CheckpointError(f"{str(folder)!r} must have a tokenizer in its fast form (tokenizer.json)")
    return tokenizer


def short_reason(error: BaseException) -> str:
    """The message of an error, cut where it is very long."""
    if isinstance(error, UnpicklingError):
        # torch's own text advises weights_only=False, with which the file could run code.
        return "its weights are damaged, or hold something other than tensors, which could run code"
    if "trust_remote_code" in str(error):
        # Transformers' own text advises trust_remote_code=True.
        return "it needs code of its own, which is never run"
    text = str(error).strip() or type(error).__name__
    return text if len(text) < LONGEST_REASON else text[:LONGEST_REASON] + " ..."
