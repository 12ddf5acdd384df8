"""`lucid convert`: copy a checkpoint of an existing architecture as a LUCID model, or back as a softmax model.

The weights are copied unchanged. LUCID's own values begin as the configuration says; a trained model saves them.
"""

import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from ..files import UnreadableFile, finish_folder, partial_path, read_json
from .checkpoint import check_checkpoint, load_config, load_skeleton, short_reason
from .decoder.configuration import LucidConfig
from .preconditioner import NAME, LucidSettings, Preconditioner, check_layers, head_size, kv_heads, lucid_layers
from .subclasses import ARCHITECTURES, PREFIX, LucidConfiguration, enable_lucid

ATTENTIONS_OF_CONVERSION = ("lucid", "softmax")
# The config.json of the softmax model, from which the conversion back restores it byte for byte.
SOFTMAX_CONFIG = "softmax_config.json"
# Where config.json points to code, and the code. Transformers names the package that it lacks.
CODE_FILE = "lucid_checkpoint.py"
CODE = """from lucid_attention.models.subclasses import lucid_config_class  # pip install lucid-attention

{name} = lucid_config_class({model_type!r})
"""
DECODER_CODE = """from lucid_attention import LucidConfig, enable_lucid  # pip install lucid-attention

enable_lucid()
"""
CARD_FILE = "README.md"
BEGIN, END = "<!-- lucid convert: this part is written by the command -->", "<!-- end of lucid convert -->"
_PART = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + "\n*", re.DOTALL)
# What a model card of the Hugging Face Hub begins with: licence, languages, data.
_FRONT_MATTER = re.compile(r"\A---\r?\n.*?\n---\r?\n", re.DOTALL)
# At the default sharpness √D, unrelated keys of this size and above hardly touch each other.
LARGE_HEAD = 64


class ConversionError(ValueError):
    """Why a checkpoint cannot be converted, in a sentence."""


def convert(
    checkpoint: str | Path,
    out: str | Path,
    *,
    layers: list[int] | str | None = None,
    strength: float | None = None,
    sharpness: float | None = None,
    to: str = "lucid",
    auto_map: bool = True,
) -> LucidSettings | None:
    """Copy a local checkpoint to `out`, as a LUCID model.

    to: "softmax" for the opposite, a plain checkpoint without LUCID, which every program reads. It takes no settings,
    and None is returned.
    auto_map: programs open `out` with trust_remote_code=True where this package is installed. A `LucidForCausalLM` can
    be copied for this, without settings; None is returned.

    layers: indices or "all"; strength, sharpness: as in `enable_lucid`. An argument of None keeps the setting of a
    checkpoint that has LUCID already; for other checkpoints it means all layers, strength 1, sharpness √D. `out`
    appears when everything is written, or not at all. Its README.md, the model card, begins with what LUCID is in it.
    """
    source, target = Path(checkpoint), Path(out)
    _check_paths(source, target)
    if to not in ATTENTIONS_OF_CONVERSION:
        raise ConversionError(f"to must be one of {', '.join(ATTENTIONS_OF_CONVERSION)}, got {to!r}")
    given = {"layers": layers, "strength": strength, "sharpness": sharpness}
    given = {name: value for name, value in given.items() if value is not None}
    config = load_config(source)
    settings = None
    if to == "softmax":
        _check_softmax(source, config, given)
    elif isinstance(config, LucidConfig) and auto_map and not given:
        pass
    else:
        settings, config = _lucid_config(source, config, given)
    files = [path for path in source.rglob("*") if path.is_file() and not _is_skipped(path.relative_to(source))]
    _check_disk_space(files, target)
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path in logging.tqdm(files, desc="Copying", unit="file"):
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        _write_config(source, partial, config, to, auto_map)
        _write_values(partial, config, settings, changed=bool(given))
        _write_card(partial / CARD_FILE, config, settings)
        if target.exists():
            # Fails if something was written into it meanwhile.
            target.rmdir()
        finish_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return settings


def _check_softmax(source: Path, config: Any, given: dict[str, Any]) -> None:
    for name, value in given.items():
        raise ConversionError(f"--{name} is a setting of LUCID: expected none with --to softmax, got {value!r}")
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


def _write_values(folder: Path, config: Any, settings: LucidSettings | None, *, changed: bool) -> None:
    """Change LUCID's values where the weights hold them: to those of the settings, or away for softmax attention."""
    if settings is not None and not changed:
        return
    kept = [] if settings is None else lucid_layers(config)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names, metadata = list(file.keys()), file.metadata()
        ours = [name for name in names if f".{NAME}." in name]
        if not ours:
            continue
        tensors = load_file(path)
        new = {name: _value(name, tensors[name], config, settings) for name in ours if _layer_of(name) in kept}
        tensors = {name: x for name, x in tensors.items() if name not in ours} | new
        save_file(tensors, path, metadata)
        gone = set(ours) - set(new)
        for index in folder.glob("*.safetensors.index.json"):
            content = read_json(index)
            content["weight_map"] = {name: place for name, place in content["weight_map"].items() if name not in gone}
            index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _layer_of(name: str) -> int:
    return int(re.findall(r"\.(\d+)\.", name)[-1])


def _value(name: str, old: Tensor, config: Any, settings: LucidSettings | None) -> Tensor:
    assert settings is not None
    kind = name.rpartition(".")[2]
    initial = Preconditioner(kv_heads(config), head_size(config), settings).initial(settings)
    if kind in settings.learned or kind not in initial:
        return old
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


def _check_disk_space(files: list[Path], target: Path) -> None:
    needed = sum(path.stat().st_size for path in files)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ConversionError(f"OUT needs {needed / 1e9:.2f} GB, and {str(parent)!r} has {free / 1e9:.2f} GB left")


def convert_and_report(
    checkpoint: str | Path,
    out: str | Path,
    *,
    layers: str | None = None,
    layers_from: str | Path | None = None,
    most_change: float | None = None,
    to: str = "lucid",
    auto_map: bool = True,
    **settings: float | None,
) -> None:
    """`convert`, then print how to load the new checkpoint and how to train it further.

    layers: "all", or indices and ranges such as "0,2,8-11". layers_from, most_change: see `layers_within`.
    """
    choice = None
    if layers_from is not None or most_change is not None:
        if layers_from is None or most_change is None:
            missing = "--layers-from" if layers_from is None else "--most-change"
            raise ConversionError(f"--layers-from and --most-change go together: expected both, got no {missing}")
        if layers is not None or to == "softmax":
            other = "--to softmax" if to == "softmax" else "--layers"
            raise ConversionError(f"--layers-from chooses layers for LUCID: expected no {other} with it")
        _check_paths(Path(checkpoint), Path(out))
        choice = layers_within(layers_from, most_change, load_config(checkpoint).model_type)
    chosen = choice.layers if choice else None if layers is None else read_layers(layers)
    written = convert(checkpoint, out, layers=chosen, to=to, auto_map=auto_map, **settings)
    config = load_config(out)
    if to == "softmax":
        print(f"{out}: a plain {config.model_type} with softmax attention")
        print("  Its outputs are not those of the LUCID model, unless that had strength 0")
        return
    if written is None:
        print(f"{out}: a copy of {checkpoint}, for programs with trust_remote_code=True")
    else:
        _print_layers(str(out), config, written)
        if choice is not None:
            print(
                f"  Chosen by {layers_from}: they cost {choice.change:.3g} nats together, at once and without "
                f"training, on {choice.tokens} tokens"
            )
        _print_training(str(out), config, written)
    print("Load it with")
    print("  import lucid_attention; lucid_attention.enable_lucid()")
    print(f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")
    if auto_map:
        print("or with trust_remote_code=True in any program whose Python has lucid-attention")


def read_layers(text: str) -> list[int] | str:
    """ "all", or indices and ranges: "0,2,8-11" -> [0, 2, 8, 9, 10, 11]."""
    if text == "all":
        return text
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        # The number of digits bounds the range, whose indices are in memory.
        if not match or not int(match[1]) <= int(match[2] or match[1]):
            raise ConversionError(f"--layers must be 'all' or indices and ranges such as 0,2,8-11, got {text!r}")
        chosen.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


def _print_layers(out: str, config: Any, settings: LucidSettings) -> None:
    layers = lucid_layers(config)
    print(f"{out}: LUCID of strength {settings.strength:g} in {len(layers)} of {config.num_hidden_layers} layers")
    print(f"  layers {', '.join(map(str, layers))}")
    if config.model_type.removeprefix(PREFIX) not in ARCHITECTURES:
        print(f"  {config.model_type!r} is not among the architectures that `enable_lucid()` knows: see --auto-map")


def _print_training(out: str, config: Any, settings: LucidSettings) -> None:
    """Where the model stands on the way to LUCID, and the ramp that leads to the end."""
    root = math.sqrt(head_size(config))
    c = root if settings.sharpness is None else settings.sharpness
    if settings.strength < 1:
        print(
            f"Its strength is {settings.strength:g}, and LUCID's is 1. Training raises it from 0 in half of the steps:"
        )
        ramp, callback = "strength_steps=0.5", "StrengthRamp(steps=0.5)"
    elif c > root:
        print(f"Its sharpness is {c:g}, and LUCID's is √D = {root:.4g}. Training lowers it in half of the steps:")
        ramp, callback = f"sharpness_steps=0.5 --set sharpness_start={c:g}", f"SharpnessRamp(steps=0.5, start={c:g})"
    else:
        print("LUCID acts in full at once, so the loss jumps. --sharpness 64 and a ramp in training are gentler")
        return
    print(f"  lucid train RECIPE --from {out} --data TOKENS --set {ramp}")
    print(f"or in a Trainer:  callbacks=[lucid_attention.{callback}]")


@dataclass(frozen=True)
class Choice:
    """Layers, and by how many nats the loss rose when they became LUCID together, on `tokens` tokens."""

    layers: list[int]
    change: float
    tokens: int


def layers_within(analysis: str | Path, most_change: float, model_type: str) -> Choice:
    """The largest set of layers whose measured change is at most `most_change`; of several, the one that costs least.

    analysis: an analysis.json with disturbances of a model of the architecture `model_type`. Sets at strength 1 and a
    sharpness of √D count: single layers, the cheapest ones together, and all.
    """
    if not math.isfinite(most_change):
        raise ValueError(f"--most-change must be a number of nats, got {most_change}")
    path = Path(analysis)
    content = read_json(path)
    try:
        records, about, tokens = content["results"]["disturbance"], content["checkpoint"], content["input"]["tokens"]
        root = float(records[0]["sharpness"])
        sets = [
            Choice([int(layer) for layer in record["layers"]], float(record["change"]), int(tokens))
            for record in records[1:]
            if record["strength"] == 1 and record["sharpness"] == root
        ]
        measured: Any = about["model_type"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UnreadableFile(
            f"{path}: expected the numbers of `lucid analyze CHECKPOINT --what disturbance`, and they are not in it"
        ) from error
    if measured != model_type:
        raise ValueError(f"{path} is about a model of the architecture {measured!r}, expected {model_type!r}")
    if not sets:
        raise ValueError(f"{path}: no layer was measured at strength 1 and a sharpness of √D = {root:g}")
    fitting = [one for one in sets if one.change <= most_change]
    if not fitting:
        least = min(sets, key=lambda one: one.change)
        names = ", ".join(map(str, least.layers))
        raise ValueError(
            f"--most-change {most_change:g}: no measured set of layers costs so little; the cheapest, {names}, "
            f"costs {least.change:.4g} nats"
        )
    return max(fitting, key=lambda one: (len(one.layers), -one.change))


def with_card(original: str, config: Any, settings: LucidSettings) -> str:
    """The text of a README.md with the part about LUCID in front, after its front matter. original: may be empty."""
    text = without_card(original)
    front = found[0] if (found := _FRONT_MATTER.match(text)) else ""
    return front + _part(config, settings) + text.removeprefix(front)


def without_card(text: str) -> str:
    """The text of a README.md as it was before `with_card`."""
    return _PART.sub("", text, count=1)


def _part(config: Any, settings: LucidSettings) -> str:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = lucid_layers(config)
    by_default = settings.sharpness is None
    sharpness = f"√{size} = {math.sqrt(size):.3g}, the default" if by_default else f"{settings.sharpness:g}"
    limits = [
        "The weights are those of the softmax model. Until the model is trained further, LUCID of strength above 0 "
        "changes its outputs, and its quality has to be measured.",
        "Training that starts from here is smoother with a ramp: `StrengthRamp`, `SharpnessRamp`.",
    ]
    if by_default and size >= LARGE_HEAD:
        limits.append(
            f"With heads of {size} and this sharpness LUCID is nearly softmax attention where keys are unrelated; a "
            "sharpness of about 4 lets it act."
        )
    lines = [
        BEGIN,
        "",
        f"# A {config.model_type.removeprefix(PREFIX)} with LUCID attention",
        "",
        "Attention reads P⁻¹V in the place of V, where P holds the similarities of the keys (*LUCID: Attention with "
        "Preconditioned Representations*). Made by `lucid convert` of lucid-attention; programs without that package "
        "refuse this checkpoint.",
        "",
        "```python",
        "import lucid_attention, transformers",
        "",
        "lucid_attention.enable_lucid()",
        'model = transformers.AutoModelForCausalLM.from_pretrained("THIS FOLDER")',
        "```",
        "",
        "`lucid convert --to softmax` gives the softmax model back.",
        "",
        "| setting | |",
        "|---|---|",
        f"| layers with LUCID | {', '.join(map(str, layers))} of {config.num_hidden_layers} |",
        f"| strength s | {settings.strength:g} (0 is softmax attention, 1 is LUCID) |",
        f"| sharpness c | {sharpness} |",
        "",
        "Limits:",
        "",
        *(f"- {limit}" for limit in limits),
        "",
        END,
        "",
        "",
    ]
    return "\n".join(lines)
