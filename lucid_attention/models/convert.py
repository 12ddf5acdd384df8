"""`lucid convert`: copy a checkpoint of an existing architecture, with LUCID switched on in its configuration, or off.

LUCID has no weights of its own, so the weights are copied unchanged.
"""

import argparse
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from ..files import finish_folder, partial_path
from .arguments import ATTENTIONS_OF_CONVERSION
from .checkpoint import CheckpointError, check_checkpoint, load_config, short_reason
from .decoder.configuration import LucidConfig
from .dropin.api import enable_lucid
from .dropin.hooks import layer_types
from .dropin.settings import NAME, LucidSettings, drop_settings, full_layers, parts_of, uses_lucid
from .layer_costs import Choice, layers_within
from .model_card import CARD_FILE, with_card, without_card
from .ramps import head_size
from .saved import CODE_FILE, add_auto_map

# Architectures that the tests convert, run and reload.
TESTED = ("gemma2", "gemma3", "gemma3_text", "gpt_neox", "gpt_oss", "llama", "mistral", "olmo2", "qwen2", "qwen3")


class ConversionError(Exception):
    """Why a checkpoint cannot be converted, in a sentence."""


def convert(
    checkpoint: str | Path,
    out: str | Path,
    *,
    layers: list[int] | str | None = None,
    strength: float | None = None,
    sharpness: float | None = None,
    to: str = "lucid",
    auto_map: bool = False,
) -> LucidSettings | None:
    """Copy a local checkpoint to `out`, with LUCID in its configuration.

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
    settings = {"layers": layers, "strength": strength, "sharpness": sharpness}
    if to == "softmax":
        config = _softmax_config(source, settings | {"auto-map": auto_map or None})
    elif auto_map and not any(value is not None for value in settings.values()) and _is_own_decoder(source):
        config = load_config(source)
    else:
        config = _lucid_config(source, layers, strength, sharpness)
    files = [path for path in source.rglob("*") if path.is_file() and not _is_skipped(path.relative_to(source))]
    _check_disk_space(files, target)
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path in logging.tqdm(files, desc="Copying", unit="file"):
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        config.save_pretrained(partial)
        if auto_map:
            add_auto_map(partial)
        written = load_config(partial).get_text_config(decoder=True)
        is_dropin = to == "lucid" and not isinstance(written, LucidConfig)
        assert uses_lucid(written) == is_dropin, "the configuration was written with the wrong attention"
        settings_written = LucidSettings.from_dict(getattr(written, NAME)) if is_dropin else None
        _write_card(partial / CARD_FILE, written, settings_written)
        if target.exists():
            # Fails if something was written into it meanwhile.
            target.rmdir()
        finish_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return settings_written


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
    try:
        check_checkpoint(source)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "holds something" if target.is_dir() else "is a file"
        raise ConversionError(f"OUT must be new or an empty folder, got {str(target)!r}, which {problem}")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"OUT must not lie inside CHECKPOINT, got {str(target)!r} in {str(source)!r}")


def _is_own_decoder(source: Path) -> bool:
    try:
        return isinstance(load_config(source), LucidConfig)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error


def _softmax_config(source: Path, settings: dict[str, Any]) -> Any:
    for name, value in settings.items():
        if value is not None:
            raise ConversionError(f"--{name} is a setting of LUCID: expected none with --to softmax, got {value!r}")
    try:
        config = load_config(source)
    except CheckpointError as error:
        raise ConversionError(str(error)) from error
    if isinstance(config, LucidConfig):
        raise ConversionError(
            f"{str(source)!r} is a LucidForCausalLM, which other programs do not know with any attention: expected a "
            "converted checkpoint of another architecture"
        )
    configs = [config, *parts_of(config).values()]
    if not any(map(uses_lucid, configs)):
        raise ConversionError(f"{str(source)!r} has no LUCID: expected a checkpoint with LUCID for --to softmax")
    for one in configs:
        drop_settings(one)
    return config


def _lucid_config(source: Path, layers: list[int] | str | None, strength: float | None, sharpness: float | None) -> Any:
    try:
        config = load_config(source)
        with torch.device("meta"):
            # Shapes without weights are enough to find out whether the architecture can use LUCID.
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
        before = LucidSettings.from_dict(getattr(text, NAME, None) if uses_lucid(text) else None)
        enable_lucid(
            model,
            layers=None if layers == "all" else before.layers if layers is None else layers,  # type: ignore[arg-type]
            strength=before.strength if strength is None else strength,
            sharpness=before.sharpness if sharpness is None else sharpness,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConversionError(f"{str(source)!r} cannot be converted: {short_reason(error)}") from error
    return model.config


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


def run(args: argparse.Namespace) -> int:
    """`lucid convert`. At the end it prints how to load the new checkpoint."""
    try:
        choice = _choice(args)
        settings = convert(
            args.checkpoint,
            args.out,
            layers=args.layers if choice is None else choice.layers,
            strength=args.strength,
            sharpness=args.sharpness,
            to=args.to,
            auto_map=args.auto_map,
        )
    except ConversionError as error:
        print(f"lucid convert: error: {error}", file=sys.stderr)
        return 1
    config = load_config(args.out).get_text_config(decoder=True)
    if args.to == "softmax":
        print(f"{args.out}: a plain {config.model_type} with softmax attention")
        print("  Its outputs are not those of the LUCID model, unless that had strength 0")
        return 0
    if settings is None:
        print(f"{args.out}: a copy of {args.checkpoint}, for programs with trust_remote_code=True")
    else:
        _print_layers(args.out, config, settings)
        if choice is not None:
            print(
                f"  Chosen by {args.layers_from}: they cost {choice.change:.3g} nats together, at once and without "
                f"training, on {choice.tokens} tokens"
            )
        _print_training(args.out, config, settings)
    print("Load it with")
    print("  import lucid_attention; lucid_attention.enable_lucid()")
    print(f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    print("or in a tool of others:  lucid run TOOL ...")
    if args.auto_map:
        print("or with trust_remote_code=True in any program whose Python has lucid-attention")
    return 0


def _choice(args: argparse.Namespace) -> Choice | None:
    """The layers of --layers-from."""
    given = {"--layers-from": args.layers_from, "--most-change": args.most_change}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConversionError(f"--layers-from and --most-change go together: expected both, got no {missing[0]}")
    if args.layers is not None or args.to == "softmax":
        other = "--to softmax" if args.to == "softmax" else "--layers"
        raise ConversionError(f"--layers-from chooses layers for LUCID: expected no {other} beside it")
    _check_paths(Path(args.checkpoint), Path(args.out))
    try:
        model_type = load_config(args.checkpoint).get_text_config(decoder=True).model_type
        return layers_within(args.layers_from, args.most_change, model_type)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def _print_layers(out: str, config: Any, settings: LucidSettings) -> None:
    layers = list(settings.layers) if settings.layers is not None else full_layers(layer_types(config))
    print(f"{out}: LUCID of strength {settings.strength:g} in {len(layers)} of {config.num_hidden_layers} layers")
    print(f"  layers {', '.join(map(str, layers))}")
    if config.model_type not in TESTED:
        print(f"  {config.model_type!r} is not among the architectures that are tested ({', '.join(TESTED)})")


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
