"""`lucid convert`: a checkpoint of an existing architecture, to be used and trained further with LUCID.

LUCID has no weights of its own, so weights are copied as they are; what changes is the configuration.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from .checkpoint import check_checkpoint
from .dropin.api import enable_lucid
from .dropin.hooks import layer_types
from .dropin.settings import NAME, LucidSettings, full_layers, uses_lucid

# Architectures that the tests convert, run and reload.
TESTED = ("gemma2", "gemma3", "gemma3_text", "gpt_neox", "gpt_oss", "llama", "mistral", "olmo2", "qwen2", "qwen3")


class ConversionError(Exception):
    """What stands in the way of a conversion, in a sentence."""


def convert(
    checkpoint: str | Path,
    out: str | Path,
    *,
    layers: list[int] | str | None = None,
    strength: float | None = None,
    sharpness: float | None = None,
) -> LucidSettings:
    """Copy a local checkpoint to `out`, with LUCID in its configuration.

    layers: indices or "all"; strength, sharpness: as in `enable_lucid`. What is not given stays what it is in a
    checkpoint that has LUCID already, and is all layers, 1 and √D in another. `out` appears when everything is
    written, or not at all.
    """
    source, target = Path(checkpoint), Path(out)
    _check_paths(source, target)
    config = _converted_config(source, layers, strength, sharpness)
    files = [path for path in source.rglob("*") if path.is_file() and not _is_left_behind(path.relative_to(source))]
    _check_room(files, target)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for path in logging.tqdm(files, desc="Copying", unit="file"):
            copy = partial / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        config.save_pretrained(partial)
        written = AutoConfig.from_pretrained(partial).get_text_config(decoder=True)
        assert uses_lucid(written), "the configuration was written without LUCID"
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return LucidSettings.from_dict(getattr(written, NAME))


def _check_paths(source: Path, target: Path) -> None:
    if source.is_file():
        raise ConversionError(f"CHECKPOINT must be a folder with config.json and weights, got the file {str(source)!r}")
    try:
        check_checkpoint(source)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        came = "holds something" if target.is_dir() else "is a file"
        raise ConversionError(f"OUT must be new or an empty folder, got {str(target)!r}, which {came}")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConversionError(f"OUT must not lie inside CHECKPOINT, got {str(target)!r} in {str(source)!r}")


def _converted_config(
    source: Path, layers: list[int] | str | None, strength: float | None, sharpness: float | None
) -> Any:
    enable_lucid()
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            # Shapes only: it shows whether the architecture can be switched over, and costs nothing.
            model = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config(decoder=True)
        before = LucidSettings.from_dict(getattr(text, NAME, None) if uses_lucid(text) else None)
        enable_lucid(
            model,
            layers=None if layers == "all" else before.layers if layers is None else layers,  # type: ignore[arg-type]
            strength=before.strength if strength is None else strength,
            sharpness=before.sharpness if sharpness is None else sharpness,
        )
    except (ValueError, TypeError, KeyError, OSError, json.JSONDecodeError) as error:
        # Some of Transformers' messages list every model there is.
        said = str(error) if len(str(error)) < 400 else str(error)[:400] + " ..."
        raise ConversionError(f"{str(source)!r} cannot be converted: {said}") from error
    return model.config


def _is_left_behind(path: Path) -> bool:
    """Hidden files, the old configuration, and the checkpoints of a training run inside this one."""
    nested = path.parts[0].startswith("checkpoint-") and len(path.parts) > 1
    return nested or path == Path("config.json") or any(part.startswith(".") for part in path.parts)


def _check_room(files: list[Path], target: Path) -> None:
    needed = sum(path.stat().st_size for path in files)
    here = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(here).free
    if free < needed:
        raise ConversionError(f"OUT needs {needed / 1e9:.2f} GB, and {str(here)!r} has {free / 1e9:.2f} GB left")


def read_layers(text: str) -> list[int] | str:
    """ "all", or indices and ranges: "0,2,8-11" -> [0, 2, 8, 9, 10, 11]."""
    if text == "all":
        return text
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise argparse.ArgumentTypeError(f"expected 'all' or indices and ranges such as 0,2,8-11, got {text!r}")
        chosen.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid convert`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and weights")
    parser.add_argument("out", metavar="OUT", help="folder to be written; must not exist or be empty")
    parser.add_argument("--layers", type=read_layers, default=None, metavar="LIST", help="all, or as in 0,2,8-11")
    parser.add_argument(
        "--strength",
        type=float,
        default=None,
        metavar="S",
        help="from 0, exactly the original model, to 1, LUCID (default). Start at 0 and let StrengthRamp raise it in "
        "training to move a pretrained model over without a jump in its loss",
    )
    parser.add_argument("--sharpness", type=float, default=None, metavar="C", help="of the preconditioner, default √D")


def run(args: argparse.Namespace) -> int:
    """`lucid convert`: what to use it for is printed at the end."""
    try:
        settings = convert(
            args.checkpoint, args.out, layers=args.layers, strength=args.strength, sharpness=args.sharpness
        )
    except ConversionError as error:
        print(f"lucid convert: error: {error}", file=sys.stderr)
        return 1
    config = AutoConfig.from_pretrained(args.out).get_text_config(decoder=True)
    layers = list(settings.layers) if settings.layers is not None else full_layers(layer_types(config))
    print(f"{args.out}: LUCID of strength {settings.strength:g} in {len(layers)} of {config.num_hidden_layers} layers")
    print(f"  layers {', '.join(map(str, layers))}")
    if config.model_type not in TESTED:
        print(f"  {config.model_type!r} is not among the architectures that are tested ({', '.join(TESTED)})")
    print("Load it with")
    print("  import lucid_attention; lucid_attention.enable_lucid()")
    print(f"  model = transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    return 0
