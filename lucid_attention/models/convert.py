"""`lucid convert`: copy a checkpoint of an existing architecture as a LUCID model, or back as a softmax model.

The weights are copied unchanged. LUCID's own values begin as the configuration says; a trained model saves them. The
maps of calibrated keys are in a file of their own.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..files import finish_folder, partial_path, read_json
from .checkpoint import WEIGHTS as WEIGHT_FILES
from .checkpoint import check_checkpoint, load_config, load_model, load_skeleton, load_tokenizer, short_reason
from .decoder.configuration import LucidConfig
from .decoder.modeling import LucidForCausalLM
from .preconditioner import NAME, LucidSettings, head_size, lucid_layers, uses_lucid
from .subclasses import PREFIX, LucidConfiguration, enable_lucid

# The keys that P is made of: arguments of `enable_lucid`.
KEYS: dict[str, dict[str, Any]] = {
    "whitened": {"center": "calibrated", "whiten": True},
    "centered": {"center": "calibrated", "whiten": False},
    "raw": {"center": "none", "whiten": False},
}
# Rows of a sample of texts, and their length in tokens. The last fifth of the rows is held out.
ROWS, LENGTH = 10, 512
# Documents that a sample takes its rows from.
DOCUMENTS = 64
# Files of the softmax model, from which the conversion back restores it byte for byte, and the maps of the keys.
SOFTMAX_CONFIG, SOFTMAX_INDEX, SOFTMAX_WEIGHTS = "softmax_config.json", "softmax_index.json", "softmax.safetensors"
INDEX, WEIGHTS, MAPS = "model.safetensors.index.json", "model.safetensors", "lucid.safetensors"
# Where config.json points to code, and the code. Transformers names the package that it lacks.
CODE_FILE = "lucid_checkpoint.py"
CODE = """from lucid_attention.models.subclasses import lucid_config_class  # of the package lucid-attention

{name} = lucid_config_class({model_type!r})
"""
# Options of `LucidAttention` that the architectures of Transformers have too, with the only value of some; the names
# of its tensors, and theirs.
OPTIONS: dict[str, Any] = {
    **dict.fromkeys(("sharpness", "strength", "learn_sharpness", "center", "whiten", "impl")),
    "norm": "key",
    "learn_beta": False,
    "double_beta": False,
    "block": 1,
}
TENSORS = {"key_center": "center", "key_matrix": "matrix", "log_sharpness": "sharpness"}
CARD_FILE = "README.md"
BEGIN, END = "<!-- lucid convert: this part is written by the command -->", "<!-- end of lucid convert -->"
_PART = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + "\n*", re.DOTALL)
# What a model card of the Hugging Face Hub begins with: licence, languages, data.
_FRONT_MATTER = re.compile(r"\A---\r?\n.*?\n---\r?\n", re.DOTALL)
PART = f"""{BEGIN}

# A {{kind}} with LUCID attention

Attention reads P⁻¹V in the place of V, where P holds the similarities of the keys (*LUCID: Attention with
Preconditioned Representations*). Made by `lucid convert` of lucid-attention; programs without that package refuse this
checkpoint.

```python
import lucid_attention, transformers

lucid_attention.enable_lucid()
model = transformers.AutoModelForCausalLM.from_pretrained("THIS FOLDER")
```

`lucid convert --to softmax` gives the softmax model back.

| setting | |
|---|---|
| layers with LUCID | {{layers}} of {{count}} |
| strength s | {{strength:g}} (0 is softmax attention, 1 is LUCID) |
| sharpness c | {{sharpness}} |
| keys that P is made of | {{keys}} |

The weights are those of the softmax model. Until the model is trained further, LUCID of strength above 0 changes its
outputs, and its quality has to be measured.

{END}

"""


class ConversionError(ValueError):
    """Why a checkpoint cannot be converted, in a sentence."""


def convert(
    checkpoint: str | Path,
    out: str | Path,
    *,
    layers: list[int] | str | None = None,
    strength: float | None = None,
    sharpness: float | None = None,
    keys: str | None = None,
    texts: Iterable[str] | None = None,
    device: str | torch.device = "cpu",
    to: str = "lucid",
    auto_map: bool = True,
) -> LucidSettings | None:
    """Copy a local checkpoint to `out`, as a LUCID model.

    layers: indices or "all"; strength, sharpness: as in `enable_lucid`. `out` appears when everything is written, or
    not at all. Its README.md, the model card, begins with what LUCID is in it.

    A checkpoint of `LucidForCausalLM` becomes a Llama, Qwen2 or Qwen3 (`as_dropin`). It takes no settings, as one with
    LUCID, which is copied for `auto_map`: `enable_lucid(model, ...)` and `save_pretrained` change its settings.

    keys: what P is made of. "whitened" (default): Σ^(−½)(k − μ), with μ and Σ per layer and head of the keys of a
        sample of texts; "centered": k − μ; "raw": k, which are similar in a trained model: P breaks most models.
    texts: the sample, of which about 4000 tokens are used (see `sample`); None for the help texts of Python.
    device: where the model reads the sample.
    to: "softmax" for the opposite, a plain checkpoint without LUCID, which every program reads.
    auto_map: programs open `out` with trust_remote_code=True where this package is installed.

    Returns:
        The settings of the model in `out`; None for one without LUCID.
    """
    source, target = Path(checkpoint), Path(out)
    _check_paths(source, target)
    if to not in ("lucid", "softmax"):
        raise ConversionError(f"to must be lucid or softmax, got {to!r}")
    if keys is not None and keys not in KEYS:
        raise ConversionError(f"keys must be one of {', '.join(KEYS)}, got {keys!r}")
    config = load_config(source)
    given = {"layers": layers, "strength": strength, "sharpness": sharpness, "keys": keys, "texts": texts}
    has_lucid = isinstance(config, (LucidConfiguration, LucidConfig))
    if (has_lucid or to == "softmax") and (names := [name for name, value in given.items() if value is not None]):
        raise ConversionError(f"only a checkpoint of another attention takes settings of LUCID, got {', '.join(names)}")
    if to == "softmax" and not isinstance(config, LucidConfiguration):
        hint = ": convert it to a model with LUCID first" if has_lucid else " with LUCID"
        raise ConversionError(f"to='softmax' needs a checkpoint of Transformers' architectures{hint}")
    maps, model = None, None
    if isinstance(config, LucidConfig):
        model = as_dropin(load_model(source))
        config = model.config
    elif not has_lucid:
        settings = {name: given[name] for name in ("strength", "sharpness") if given[name] is not None}
        settings |= {"layers": None if layers == "all" else layers, **KEYS[keys or "whitened"]}
        config = _lucid_config(source, settings)
        if settings["center"] == "calibrated":
            maps = _calibrated(source, settings, texts, device)
    chosen = None if to == "softmax" or not uses_lucid(config) else LucidSettings.from_dict(getattr(config, NAME))
    files = [path for path in source.rglob("*") if path.is_file() and not _is_skipped(path.relative_to(source), model)]
    _check_links(files, source.resolve())
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for path in logging.tqdm(files, desc="Copying", unit="file"):
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        if model is not None:
            model.save_pretrained(partial)
        elif to == "softmax":
            _restore_softmax(partial, config)
        elif not has_lucid:
            shutil.copy2(source / "config.json", partial / SOFTMAX_CONFIG)
        if maps:
            _add_maps(partial, maps)
        if chosen is not None:
            _write_config(partial, config, auto_map)
        _write_card(partial / CARD_FILE, config, chosen)
        if target.exists():
            # Fails if something was written into it meanwhile.
            target.rmdir()
        finish_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return chosen


def as_dropin(model: LucidForCausalLM) -> PreTrainedModel:
    """The same model in an architecture of Transformers, Llama, Qwen2 or Qwen3: for vLLM, servers, static caches.

    Layers with the attention lucid get LUCID, those with softmax keep it. What these architectures do not have is
    refused. The opposite of `LucidConfig.from_llama`.
    """
    config = model.config
    names, rope = config.layer_attentions, config.rope_parameters or {"rope_type": None}
    options = config.options_of("lucid") if "lucid" in names else {}
    biased = config.attention_bias
    # What it is, and what it must be.
    wrong = {
        "attention": (set(names) - {"lucid", "softmax"}, set()),
        "rope_parameters": (config.rope_parameters is None, False),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        "attention_bias with qk_norm": (config.qk_norm and biased == "qkv", False),
        "rms_norm_eps with qk_norm": (config.rms_norm_eps if config.qk_norm else 1e-6, 1e-6),
        "options of softmax": (
            "softmax" in names and config.options_of("softmax"),
            {} if "softmax" in names else False,
        ),
        **{
            name: (x, OPTIONS.get(name, "left out")) for name, x in options.items() if OPTIONS.get(name, "") is not None
        },
    }
    for name, (found, expected) in wrong.items():
        if found != expected:
            raise ConversionError(
                f"LucidForCausalLM becomes a Llama with the attentions lucid and softmax, RoPE of whole heads and the "
                f"options {', '.join(OPTIONS)}: expected {name} = {expected!r}, got {found!r}"
            )
    stock = CONFIG_MAPPING["qwen3" if config.qk_norm else "qwen2" if biased == "qkv" else "llama"]
    own = {field.name for field in fields(stock)} - {field.name for field in fields(PreTrainedConfig)} - {"layer_types"}
    shared = {name: getattr(config, name) for name in own if hasattr(config, name)} | {"attention_bias": biased is True}
    made = AutoModelForCausalLM.from_config(stock(**shared), dtype=model.dtype)
    if "lucid" in names:
        enable_lucid(
            made,
            layers=[index for index, name in enumerate(names) if name == "lucid"],
            learned=["sharpness"] if options.get("learn_sharpness") else [],
            **{name: options[name] for name in ("strength", "sharpness", "center", "whiten") if name in options},
        )
    state = {}
    for name, x in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        x = x.float().exp() if kind == "log_sharpness" else x
        state[f"{path}.{NAME}.{TENSORS[kind]}" if kind in TENSORS else name] = x
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(f".{NAME}." in name for name in missing)
    made.generation_config = model.generation_config
    return made.eval()


def sample(tokenizer: Any, texts: Iterable[str] | None = None) -> tuple[Tensor, Tensor]:
    """Tokens to calibrate with: [8, 512], and held-out ones: [2, 512]; fewer rows of shorter texts.

    texts: None for the help texts of Python, which are English with code. The first ones have equal parts in it.
    """
    if texts is None:
        from pydoc_data.topics import topics

        texts = topics.values()
    wanted = ROWS * LENGTH
    documents = [tokenizer(text[: 16 * wanted], verbose=False)["input_ids"] for text in islice(texts, DOCUMENTS)]
    tokens = [token for document in documents for token in document[: -(-wanted // len(documents))]]
    if len(tokens) < wanted:
        tokens = [token for document in documents for token in document]
    rows = min(len(tokens) // LENGTH, ROWS)
    if rows < 2:
        raise ConversionError(f"the texts must have at least {2 * LENGTH} tokens, got {len(tokens)}")
    return torch.tensor(tokens[: rows * LENGTH]).view(rows, LENGTH).split([rows - -(-rows // 5), -(-rows // 5)])


def calibrate(model: Any, ids: Tensor, keys: str, **settings: Any) -> None:
    """Switch a model over to LUCID of these keys, by the keys that the softmax model has for ids: [B, T].

    So one map serves every sharpness and every choice of layers. settings: of `enable_lucid`.
    """
    enable_lucid(model, **settings | KEYS[keys] | {"strength": 0.0})
    if keys != "raw":
        model.calibrate(ids.to(model.device))
    enable_lucid(model, **settings | KEYS[keys])


def _calibrated(
    source: Path, settings: dict[str, Any], texts: Iterable[str] | None, device: str | torch.device
) -> dict[str, Tensor]:
    """The maps of the keys, by their names in a checkpoint."""
    try:
        ids, _ = sample(load_tokenizer(source), texts)
        model = load_model(source).to(device)
        if (largest := int(ids.max())) >= model.get_input_embeddings().num_embeddings:
            raise ConversionError(f"the tokenizer must be that of the model, got the id {largest}")
        calibrate(model, ids, "whitened" if settings["whiten"] else "centered", layers=settings["layers"])
    except ValueError as error:
        raise ConversionError(
            f"{str(source)!r} cannot be calibrated: {short_reason(error)}. keys='raw' needs no calibration, and breaks "
            "most models"
        ) from error
    state = model.state_dict()
    return {name: state[name].cpu() for name in state if name.endswith((f".{NAME}.center", f".{NAME}.matrix"))}


def _add_maps(folder: Path, maps: dict[str, Tensor]) -> None:
    """Write the maps as one more part of the weights, whose files stay as they are."""
    if (folder / INDEX).exists():
        shutil.copy2(folder / INDEX, folder / SOFTMAX_INDEX)
        content = read_json(folder / INDEX)
    elif (folder / WEIGHTS).exists():
        with safe_open(folder / WEIGHTS, "pt") as file:
            content = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), SOFTMAX_WEIGHTS)}
        (folder / WEIGHTS).rename(folder / SOFTMAX_WEIGHTS)
    else:
        raise ConversionError(f"calibration needs weights in {WEIGHTS}, or in parts with an {INDEX}")
    content["weight_map"] |= dict.fromkeys(maps, MAPS)
    save_file(maps, folder / MAPS, {"format": "pt"})
    _write_json(folder / INDEX, content)


def _lucid_config(source: Path, settings: dict[str, Any]) -> Any:
    """The configuration with LUCID. settings: of `enable_lucid`."""
    try:
        # Shapes without weights are enough to find out whether the architecture can use LUCID.
        skeleton: Any = load_skeleton(source)
        enable_lucid(skeleton, **settings)
    except (ValueError, TypeError, KeyError) as error:
        raise ConversionError(f"{str(source)!r} cannot be converted: {short_reason(error)}") from error
    skeleton.config.architectures = [type(skeleton).__name__]
    return skeleton.config


def _write_config(folder: Path, config: Any, auto_map: bool) -> None:
    content = json.loads(config.to_json_string())
    if auto_map:
        name, kind = type(config).__name__, config.model_type.removeprefix(PREFIX)
        (folder / CODE_FILE).write_text(CODE.format(name=name, model_type=kind), encoding="utf-8")
        content["auto_map"] = {"AutoConfig": f"{Path(CODE_FILE).stem}.{name}"}
    _write_json(folder / "config.json", content)


def _restore_softmax(folder: Path, config: Any) -> None:
    """Make a copy of a LUCID model a softmax model: byte for byte the original where the conversion kept it."""
    original, file = folder / SOFTMAX_CONFIG, folder / "config.json"
    if original.exists():
        original.rename(file)
    else:
        content = json.loads(config.to_json_string())
        del content[NAME], content["attn_implementation"]
        content["model_type"] = config.model_type.removeprefix(PREFIX)
        content["architectures"] = [name.removeprefix("Lucid") for name in content.get("architectures") or []]
        _write_json(file, content)
    if (folder / MAPS).exists():
        for name in (MAPS, INDEX):
            (folder / name).unlink()
        for kept, name in ((SOFTMAX_INDEX, INDEX), (SOFTMAX_WEIGHTS, WEIGHTS)):
            if (folder / kept).exists():
                (folder / kept).rename(folder / name)
    # A trained model has its values among the weights.
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        others = {name: x for name, x in tensors.items() if f".{NAME}." not in name}
        if len(others) < len(tensors):
            save_file(others, path, {"format": "pt"})
    for path in folder.glob("*.safetensors.index.json"):
        content = read_json(path)
        places = content["weight_map"]
        content["weight_map"] = {name: place for name, place in places.items() if f".{NAME}." not in name}
        if content["weight_map"] != places:
            _write_json(path, content)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_card(path: Path, config: Any, settings: LucidSettings | None) -> None:
    """Write what LUCID is in this checkpoint into its model card, or remove that part of a softmax checkpoint's."""
    # As bytes, so that line ends and strange characters of the original stay as they are.
    original = path.read_bytes().decode(errors="surrogateescape") if path.exists() else ""
    text = with_card(original, config, settings) if settings else without_card(original)
    if text:
        path.write_bytes(text.encode(errors="surrogateescape"))
    else:
        path.unlink(missing_ok=True)


def _check_paths(source: Path, target: Path) -> None:
    check_checkpoint(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "holds something" if target.is_dir() else "is a file"
        raise ConversionError(f"OUT must be new or an empty folder, got {str(target)!r}, which {problem}")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"OUT must not lie inside CHECKPOINT, got {str(target)!r} in {str(source)!r}")


def _is_skipped(path: Path, model: Any) -> bool:
    """Whether a file is hidden, of the old configuration, or part of a training checkpoint inside the folder.

    model: the model that is written instead of the old weights, or None.
    """
    if model is not None and any(path.match(pattern) for pattern in (*WEIGHT_FILES, "*.index.json")):
        return True
    nested = path.parts[0].startswith("checkpoint-") and len(path.parts) > 1
    return nested or path in (Path("config.json"), Path(CODE_FILE)) or any(part.startswith(".") for part in path.parts)


def _check_links(files: list[Path], source: Path) -> None:
    """Refuse links out of the checkpoint, whose targets would be copied, except to the blobs of the hub's cache."""
    allowed = source, source.parent.parent / "blobs"
    for path in files:
        if not any(path.resolve().is_relative_to(folder) for folder in allowed):
            raise ConversionError(f"{path} is a link out of CHECKPOINT, to {path.resolve()}: put the file in its place")


def with_card(original: str, config: Any, settings: LucidSettings) -> str:
    """The text of a README.md with the part about LUCID in front, after its front matter. original: may be empty."""
    text = without_card(original)
    front = found[0] if (found := _FRONT_MATTER.match(text)) else ""
    size = head_size(config)
    part = PART.format(
        kind=config.model_type.removeprefix(PREFIX),
        layers=", ".join(map(str, lucid_layers(config))),
        count=config.num_hidden_layers,
        strength=settings.strength,
        sharpness=f"√{size} = {math.sqrt(size):.3g}" if settings.sharpness is None else f"{settings.sharpness:g}",
        keys=keys_of(settings),
    )
    return front + part + text.removeprefix(front)


def keys_of(settings: LucidSettings) -> str:
    """The name in `KEYS`; or "learned"."""
    if settings.center == "learned":
        return "learned"
    return "raw" if settings.center == "none" else "whitened" if settings.whiten else "centered"


def without_card(text: str) -> str:
    """The text of a README.md as it was before `with_card`."""
    return _PART.sub("", text, count=1)
