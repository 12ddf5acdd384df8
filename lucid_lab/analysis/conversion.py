"""`lucid convert`: convert, calibrate, measure the loss before and after, and say how to load the result."""

import math
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lucid_attention.doctor import find_device
from lucid_attention.messages import text_table
from lucid_attention.models.checkpoint import load_config, load_model, load_tokenizer
from lucid_attention.models.convert import DOCUMENTS, ConversionError, convert, keys_of, sample
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.preconditioner import LucidSettings, Preconditioner, head_size, lucid_layers, uses_lucid
from lucid_attention.models.subclasses import ARCHITECTURES, PREFIX

from ..data.text import documents

# In units of √D.
SHARPNESSES = (1.0, 1.5, 2.0, 4.0)
# The largest change, in nats, of a sharpness that is suggested; and the least of a model that is called broken.
SMALL, BROKEN = 0.05, 1.0
# Tokens that single layers are measured on.
TOKENS_OF_LAYERS = 256


def convert_and_report(
    checkpoint: str | Path,
    out: str | Path,
    *,
    layers: str | None = None,
    calibrate: str | None = None,
    to: str = "lucid",
    auto_map: bool = True,
    device: str = "auto",
    **settings: Any,
) -> None:
    """`convert`, then print what it changed and how to load the new checkpoint.

    layers: "all", or indices and ranges such as "0,2,8-11". calibrate: a source of texts, as in `documents`.
    """
    chosen = None if layers is None else read_layers(layers)
    place = find_device(device)
    texts = None if calibrate is None else list(islice(documents(calibrate), DOCUMENTS))
    written = convert(checkpoint, out, layers=chosen, texts=texts, device=place, to=to, auto_map=auto_map, **settings)
    config = load_config(out)
    if written is None:
        print(f"{out}: a plain {config.model_type} with softmax attention")
        if to == "softmax":
            print("  Its outputs are not those of the LUCID model, unless that had strength 0")
        return
    print(_settings(str(out), config, written), flush=True)
    before = load_config(checkpoint)
    if not isinstance(before, LucidConfig) and not uses_lucid(before):
        try:
            _, ids = sample(load_tokenizer(checkpoint), texts)
        except ValueError as error:
            print(f"Its loss was not measured: {error}")
        else:
            model = load_model(out).to(place)
            # A checkpoint may ask for tuples.
            model.config.return_dict = True
            print(measured(model, written, ids.to(place)))
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


def _settings(out: str, config: Any, settings: LucidSettings) -> str:
    """What LUCID is in the new checkpoint."""
    layers, c = lucid_layers(config), settings.sharpness
    sharpness = f"√D = {math.sqrt(head_size(config)):.4g}" if c is None else f"{c:g}"
    lines = [
        f"{out}: LUCID in {len(layers)} of {config.num_hidden_layers} layers, {keys_of(settings)} keys, "
        f"sharpness {sharpness}, strength {settings.strength:g}"
    ]
    if len(layers) < config.num_hidden_layers:
        lines.append(f"  layers {', '.join(map(str, layers))}")
    if config.model_type.removeprefix(PREFIX) not in ARCHITECTURES:
        lines.append(f"  {config.model_type!r} is not among the architectures that `enable_lucid()` knows: --auto-map")
    return "\n".join(lines)


def measured(model: Any, settings: LucidSettings, ids: Tensor) -> str:
    """The loss of a converted model with softmax attention, as it is, with other sharpnesses, and layer by layer.

    ids: [B, T], held-out tokens. Leaves the settings of the model changed.
    """
    root = math.sqrt(head_size(model.config))
    c = root if settings.sharpness is None else settings.sharpness
    after = mean_loss(model, ids)
    tried = sorted({c, *(root * factor for factor in SHARPNESSES)})
    able = lucid_layers(model.config)
    before, *others = switched(model, ids, [([], c), *((able, other) for other in tried)])
    short = ids[:1, :TOKENS_OF_LAYERS]
    _, *single = switched(model, short, [([], c), *(([layer], c) for layer in able)])
    change = after - before["loss"]
    rows = [["", "loss", "change"], ["softmax, before", f"{before['loss']:.4f}", ""]]
    rows += [["LUCID, as written", f"{after:.4f}", f"{change:+.4f}"]]
    rows += [[f"  sharpness {one['sharpness']:.4g}", f"{one['loss']:.4f}", f"{one['change']:+.4f}"] for one in others]
    lines = [f"Loss on {ids.numel()} held-out tokens in nats, without training", text_table(rows)]
    lines.append(f"Change by one layer at a time, on {short.numel()} tokens")
    cells = [f"{one['layers'][0]:>3}: {one['change']:+.3f}" for one in single]
    lines += ["  ".join(row) for row in (cells[i : i + 8] for i in range(0, len(cells), 8))]
    small = [one["sharpness"] for one in others if one["change"] <= SMALL]
    raw = settings.center == "none"
    if change >= BROKEN:
        advice = "Raw keys break most models" if raw else "try a larger --sharpness, other texts, or fewer layers"
        lines.append(f"This model is BROKEN: its loss rose by {change:.2f} nats. {advice}")
    if small and change > SMALL:
        lines.append(f"--sharpness {min(small):.4g} is the smallest of these that costs at most {SMALL} nats")
    return "\n".join(lines)


@torch.no_grad()
def switched(model: Any, ids: Tensor, cases: Sequence[tuple[Sequence[int], float]]) -> list[dict[str, Any]]:
    """{"layers", "sharpness", "loss", "change"} of every case: the layers that have LUCID, and their sharpness c.

    model: with LUCID; strength and sharpness of its layers are changed. ids: [B, T]. change: of the loss since the
    first case.
    """
    modules = [module for module in model.modules() if isinstance(getattr(module, "lucid", None), Preconditioner)]
    records: list[dict[str, Any]] = []
    for layers, c in tqdm(cases, "loss", leave=False, delay=5, disable=None):
        for module in modules:
            module.lucid.strength.fill_(float(module.layer_idx in layers))
            module.lucid.sharpness.fill_(c)
        loss = mean_loss(model, ids)
        change = loss - records[0]["loss"] if records else 0.0
        records.append({"layers": list(layers), "sharpness": c, "loss": loss, "change": change})
    return records


@torch.no_grad()
def mean_loss(model: Any, ids: Tensor) -> float:
    """The mean loss of the next token, in nats. ids: [B, T]."""
    return float(model(ids, labels=ids, use_cache=False, return_dict=True).loss)
