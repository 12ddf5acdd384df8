"""`lucid convert`: copy a checkpoint of an existing architecture as a LUCID model, or back as a softmax model.

The weights are copied unchanged. LUCID's own values begin as the configuration says; a trained model saves them. The
maps of calibrated keys are in a file of their own.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from ..files import finish_folder, partial_path, read_json
from .checkpoint import check_checkpoint, load_config, load_model, load_skeleton, load_tokenizer, short_reason
from .decoder.configuration import LucidConfig
from .preconditioner import NAME, LucidSettings, Preconditioner, check_layers, head_size, kv_heads, lucid_layers
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
DECODER_CODE = """from lucid_attention import LucidConfig, enable_lucid  # of the package lucid-attention

enable_lucid()
"""
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

    layers: indices or "all"; strength, sharpness: as in `enable_lucid`. An argument of None keeps the setting of a
    checkpoint that has LUCID already; for other checkpoints it means all layers, strength 1, sharpness √D, and whitened
    keys. `out` appears when everything is written, or not at all. Its README.md, the model card, begins with what LUCID
    is in it.

    keys: what P is made of. "whitened": Σ^(−½)(k − μ), with μ and Σ per layer and head of the keys of a sample of
        texts; "centered": k − μ; "raw": k. Raw keys of a trained model are similar, and P of them breaks most models.
    texts: the sample, of which about 4000 tokens are used (see `sample`); None for the help texts of Python.
    device: where the model reads the sample.
    to: "softmax" for the opposite, a plain checkpoint without LUCID, which every program reads. It takes no settings,
        and None is returned.
    auto_map: programs open `out` with trust_remote_code=True where this package is installed. A `LucidForCausalLM` can
        be copied for this, without settings; None is returned.
    """
    source, target = Path(checkpoint), Path(out)
    _check_paths(source, target)
    if to not in ("lucid", "softmax"):
        raise ConversionError(f"to must be lucid or softmax, got {to!r}")
    if keys is not None and keys not in KEYS:
        raise ConversionError(f"keys must be one of {', '.join(KEYS)}, got {keys!r}")
    config = load_config(source)
    given: dict[str, Any] = {"layers": layers, "strength": strength, "sharpness": sharpness}
    given = {name: value for name, value in given.items() if value is not None}
    if texts is not None or (to == "lucid" and not isinstance(config, (LucidConfiguration, LucidConfig))):
        keys = keys or "whitened"
    given |= KEYS.get(keys or "", {})
    settings, maps = None, None
    if to == "softmax":
        _check_softmax(source, config, given)
    elif isinstance(config, LucidConfig) and auto_map and not given:
        pass
    else:
        settings, config = _lucid_config(source, config, given)
        if settings.center == "calibrated" and {"center", "layers"} & set(given):
            maps = _calibrated(source, settings, texts, device)
    files = [path for path in source.rglob("*") if path.is_file() and not _is_skipped(path.relative_to(source))]
    _check_links(files, source.resolve())
    _check_disk_space(files, target)
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path in logging.tqdm(files, desc="Copying", unit="file"):
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        _write_config(source, partial, config, to, auto_map)
        old = _without_maps(partial)
        if given or to == "softmax":
            _write_values(partial, config, settings, maps or {})
        if settings is not None and settings.center != "none" and (maps or old):
            _add_maps(partial, maps or old)
        _write_card(partial / CARD_FILE, config, settings)
        if target.exists():
            # Fails if something was written into it meanwhile.
            target.rmdir()
        finish_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return settings


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
    source: Path, settings: LucidSettings, texts: Iterable[str] | None, device: str | torch.device
) -> dict[str, Tensor]:
    """The maps of the keys, by their names in a checkpoint."""
    try:
        ids, _ = sample(load_tokenizer(source), texts)
        model = load_model(source).to(device)
        if (largest := int(ids.max())) >= model.get_input_embeddings().num_embeddings:
            raise ConversionError(f"the tokenizer must be that of the model, got the id {largest}")
        given = {name: getattr(settings, name) for name in ("layers", "sharpness", "learned")}
        calibrate(model, ids, "whitened" if settings.whiten else "centered", **given)
    except ValueError as error:
        raise ConversionError(
            f"{str(source)!r} cannot be calibrated: {short_reason(error)}. keys='raw' needs no calibration, and breaks "
            "most models"
        ) from error
    state = model.state_dict()
    return {name: state[name].cpu() for name in state if name.endswith((f".{NAME}.center", f".{NAME}.matrix"))}


def _without_maps(folder: Path) -> dict[str, Tensor]:
    """Undo `_add_maps`. Returns the maps."""
    if not (folder / MAPS).exists():
        return {}
    maps = load_file(folder / MAPS)
    for name in (MAPS, INDEX):
        (folder / name).unlink()
    for kept, name in ((SOFTMAX_INDEX, INDEX), (SOFTMAX_WEIGHTS, WEIGHTS)):
        if (folder / kept).exists():
            (folder / kept).rename(folder / name)
    return maps


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
    (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_softmax(source: Path, config: Any, given: dict[str, Any]) -> None:
    if given:
        names = ", ".join("keys" if name in ("center", "whiten") else name for name in given if name != "whiten")
        raise ConversionError(f"to='softmax' takes no settings of LUCID: expected none, got {names}")
    if isinstance(config, LucidConfig):
        raise ConversionError(
            f"{str(source)!r} is a LucidForCausalLM, which other programs do not know with any attention: expected a "
            "converted checkpoint of another architecture"
        )
    if not isinstance(config, LucidConfiguration):
        raise ConversionError(f"{str(source)!r} has no LUCID: expected a checkpoint with LUCID for --to softmax")


def _lucid_config(source: Path, config: Any, given: dict[str, Any]) -> tuple[LucidSettings, Any]:
    """The settings, and the configuration with them."""
    if given.get("layers") == "all":
        given = given | {"layers": None}
    try:
        if isinstance(config, LucidConfiguration):
            settings = replace(LucidSettings.from_dict(getattr(config, NAME)), **given)
            check_layers(settings, config)
            setattr(config, NAME, settings.to_dict())
            return settings, config
        settings = LucidSettings(**given)
        # Shapes without weights are enough to find out whether the architecture can use LUCID.
        skeleton: Any = load_skeleton(source)
        enable_lucid(skeleton, **given)
        skeleton.config.architectures = [type(skeleton).__name__]
        return settings, skeleton.config
    except (ValueError, TypeError, KeyError) as error:
        raise ConversionError(f"{str(source)!r} cannot be converted: {short_reason(error)}") from error


def _write_config(source: Path, folder: Path, config: Any, to: str, auto_map: bool) -> None:
    original, file = folder / SOFTMAX_CONFIG, folder / "config.json"
    if to == "softmax":
        if original.exists():
            original.rename(file)
            return
        content = json.loads(config.to_json_string())
        del content[NAME], content["attn_implementation"]
        content["model_type"] = config.model_type.removeprefix(PREFIX)
        content["architectures"] = [name.removeprefix("Lucid") for name in content.get("architectures") or []]
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return
    if not isinstance(load_config(source), (LucidConfiguration, LucidConfig)):
        shutil.copy2(source / "config.json", original)
    content = json.loads(config.to_json_string())
    if auto_map:
        name, kind = type(config).__name__, config.model_type.removeprefix(PREFIX)
        code = DECODER_CODE if isinstance(config, LucidConfig) else CODE.format(name=name, model_type=kind)
        (folder / CODE_FILE).write_text(code, encoding="utf-8")
        content["auto_map"] = {"AutoConfig": f"{Path(CODE_FILE).stem}.{name}"}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_values(folder: Path, config: Any, settings: LucidSettings | None, maps: dict[str, Tensor]) -> None:
    """Change LUCID's values where the weights hold them: to those of the settings, or away for softmax attention.

    maps: values that get a file of their own.
    """
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names, metadata = list(file.keys()), file.metadata()
        ours = [name for name in names if f".{NAME}." in name]
        if not ours:
            continue
        tensors = load_file(path)
        kept = {name: _value(name, tensors[name], config, settings) for name in ours if name not in maps}
        new = {name: x for name, x in kept.items() if x is not None}
        tensors = {name: x for name, x in tensors.items() if name not in ours} | new
        save_file(tensors, path, metadata)
        gone = set(ours) - set(new)
        for index in folder.glob("*.safetensors.index.json"):
            content = read_json(index)
            content["weight_map"] = {name: place for name, place in content["weight_map"].items() if name not in gone}
            index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _value(name: str, old: Tensor, config: Any, settings: LucidSettings | None) -> Tensor | None:
    """The value after the conversion; None if there is none."""
    layer, kind = int(re.findall(r"\.(\d+)\.", name)[-1]), name.rpartition(".")[2]
    if settings is None or layer not in lucid_layers(config):
        return None
    made = Preconditioner(kv_heads(config), head_size(config), settings)
    initial = made.initial(settings)
    if kind in settings.learned or kind not in initial:
        return old if kind in made.state_dict() else None
    return torch.full_like(old, initial[kind])


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


def _is_skipped(path: Path) -> bool:
    """Whether a file is hidden, of the old configuration, or part of a training checkpoint inside the folder."""
    nested = path.parts[0].startswith("checkpoint-") and len(path.parts) > 1
    return nested or path in (Path("config.json"), Path(CODE_FILE)) or any(part.startswith(".") for part in path.parts)


def _check_links(files: list[Path], source: Path) -> None:
    """Refuse links out of the checkpoint, whose targets would be copied, except to the blobs of the hub's cache."""
    allowed = source, source.parent.parent / "blobs"
    for path in files:
        if not any(path.resolve().is_relative_to(folder) for folder in allowed):
            raise ConversionError(f"{path} is a link out of CHECKPOINT, to {path.resolve()}: put the file in its place")


def _check_disk_space(files: list[Path], target: Path) -> None:
    needed = sum(path.stat().st_size for path in files)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConversionError(f"OUT needs {needed / 1e9:.2f} GB, and {str(parent)!r} has {free / 1e9:.2f} GB left")


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
