"""`lucid analyze`: analyses of a checkpoint on a text, written for `lucid report`, with a summary."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lucid_attention.doctor import find_device
from lucid_attention.files import read_text, write_record, write_whole
from lucid_attention.messages import text_table
from lucid_attention.models.checkpoint import (
    check_checkpoint,
    checkpoint_name,
    load_config,
    load_model,
    load_tokenizer,
)
from lucid_attention.models.convert import sample

from ..data.text import documents
from ..locks import locked
from .conditioning import condition_numbers
from .conversion import disturbances
from .hit_rate import MEASURES, Query, attention_maps, average, hit_rates
from .jacobian import jacobians

Record = dict[str, Any]
FORMAT = 1
WHAT = ("conditioning", "hit_rate", "jacobian", "maps", "disturbance")
# The longest text: κ of a head takes time that grows with the square of the length.
LONGEST = 131_072
# Rows and columns of the largest map: maps.json holds every number of them.
MOST_BINS = 512
# Heads of a layer whose maps are drawn by default: a large model has a thousand heads.
MAP_HEADS = 4
# Characters to read per token: above the average of any tokenizer.
CHARACTERS_PER_TOKEN = 8


class ModelInput(NamedTuple):
    """ids: [1, T]; queries: tokens that ask and the places of their answers, may be empty; about: a description."""

    ids: Tensor
    queries: list[Query]
    about: str


def analyze(checkpoint: Path, out: Path | None, **options: Any) -> None:
    """`lucid analyze`. options: those of the command, with underscores; None for its defaults."""
    given = {name: value for name, value in options.items() if value is not None}
    length, lengths, bins = (given.get(name) for name in ("length", "lengths", "bins"))
    what: list[str] = given.get("what", [])
    if unknown := [name for name in what if name not in WHAT]:
        raise ValueError(f"--what must be some of {', '.join(WHAT)}, got {unknown[0]!r}")
    for name, values in (("--length", [length]), ("--lengths", lengths or ())):
        if wrong := [value for value in values if value is not None and not 2 <= value <= LONGEST]:
            raise ValueError(f"{name} must be 2 to {LONGEST} tokens, got {wrong[0]}")
    if bins is not None and not 1 <= bins <= MOST_BINS:
        raise ValueError(f"--bins must be 1 to {MOST_BINS}, got {bins}")
    if "text" in given and "tokens_from" in given:
        raise ValueError("expected one source of tokens, got --text and --tokens-from")
    check_checkpoint(checkpoint)
    out = out or Path("runs") / "analysis" / checkpoint_name(checkpoint)
    tokenizer = load_tokenizer(given.get("tokenizer", checkpoint))
    model_input = _model_input(tokenizer, load_config(checkpoint).get_text_config(decoder=True).vocab_size, given)
    if not what:
        what = ["conditioning", *(["hit_rate"] if model_input.queries else []), "jacobian", "maps"]
    if "hit_rate" in what and not model_input.queries:
        raise ValueError("--what hit_rate needs to know what should be read: give --find PHRASE")
    ids = model_input.ids[0].tolist()
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
    source = {"about": model_input.about, "tokens": len(ids), "sha256": digest}
    device = find_device(given.get("device", "auto"))
    # The lock is taken before the work, so that a folder that cannot be written is refused first.
    with locked(out):
        model = load_model(checkpoint).to(device)
        config = model.config.get_text_config(decoder=True)
        attention = getattr(config, "attention", None) or getattr(config, "_attn_implementation", None)
        about = {"name": checkpoint_name(checkpoint), "model_type": config.model_type, "attention": attention}
        head = {"format": FORMAT, "checkpoint": about, "input": source}
        results = run_analyses(model, model_input, what, given)
        # Last: it changes the attention of the model.
        if "disturbance" in what:
            ids_on_device = model_input.ids.to(device)
            results["disturbance"] = disturbances(model, ids_on_device, sample(tokenizer)[0], given.get("layers"))
        files = _write(out, head, results)
    print(summary(head, results))
    print(f"\n{', '.join(str(path) for path in files)}")


# ------------------------------------------------------------------------------------------------------- inputs


def _model_input(tokenizer: Any, vocabulary: int, given: Mapping[str, Any]) -> ModelInput:
    phrases, length, text = given.get("find", []), given.get("length", 512), given.get("text")
    folder = Path(given.get("tokens_from", ""))
    if text is None and (folder / "dataset_dict.json").exists() and not phrases:
        made = from_tokens(folder, length)
    elif text is None:
        name = given.get("tokens_from", "stdlib")
        pieces, characters = [], 0
        for document in documents(name):
            pieces.append(document)
            characters += len(document)
            if characters >= length * CHARACTERS_PER_TOKEN:
                break
        made = _tokenized("\n".join(pieces), f"text of {Path(name).name}", tokenizer, length, phrases)
    elif os.path.isfile(text):  # os.path, because Path raises for names that no file can have
        made = _tokenized(read_text(Path(text)), f"text of {Path(text).name}", tokenizer, length, phrases)
    elif len(text.split()) == 1 and ("/" in text or "." in text):
        raise ValueError(f"--text must be a text or a file that exists, got {text!r}, which looks like a file")
    else:
        made = _tokenized(text, "text on the command line", tokenizer, length, phrases)
    if (largest := int(made.ids.max())) >= vocabulary:
        raise ValueError(f"the tokenizer must be that of the model, with ids below {vocabulary}, got id {largest}")
    return made


def from_tokens(folder: Path, length: int) -> ModelInput:
    """The first `length` tokens of a folder of `lucid tokenize`, its validation split if it has one."""
    from datasets import load_from_disk

    parts = load_from_disk(str(folder))
    split = parts["validation" if "validation" in parts else next(iter(parts))]
    ids = list(islice((token for row in split for token in row["input_ids"]), length))
    if len(ids) < 2:
        raise ValueError(f"{folder} must have at least two tokens, got {len(ids)}")
    return ModelInput(torch.tensor([ids]), [], f"tokens of {folder.name}")


def _tokenized(text: str, about: str, tokenizer: Any, length: int, phrases: list[str]) -> ModelInput:
    """The first `length` tokens of a text; the last of them asks for the phrases."""
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ids, offsets = encoded["input_ids"][:length], encoded["offset_mapping"][:length]
    if len(ids) < 2:
        raise ValueError(f"the {about} must have at least two tokens, got {len(ids)}")
    if not set(ids) - {tokenizer.pad_token_id, tokenizer.unk_token_id}:
        raise ValueError(f"the {about} must have tokens that the model knows, got {len(ids)} unknown or padding ones")
    spans = tuple(span for phrase in phrases for span in find(phrase, text, offsets))
    return ModelInput(torch.tensor([ids]), [Query(len(ids) - 1, spans)] if spans else [], about)


def find(phrase: str, text: str, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, last + 1) of the tokens that hold a phrase, for every occurrence of the phrase.

    offsets: (start, end) of every token in the text; (0, 0) for special tokens.
    """
    if not phrase:
        raise ValueError("--find must be a phrase of the text, got an empty one")
    spans = []
    at = text.find(phrase)
    while at >= 0:
        inside = [i for i, (start, end) in enumerate(offsets) if start < at + len(phrase) and end > at]
        # Leave out a phrase that the end of the input cuts off.
        if inside and offsets[inside[-1]][1] >= at + len(phrase):
            spans.append((inside[0], inside[-1] + 1))
        at = text.find(phrase, at + 1)
    if not spans:
        raise ValueError(f"--find must be a phrase of the {len(offsets)} tokens that are analysed, got {phrase!r}")
    return spans


# ------------------------------------------------------------------------------------------------------ results


def run_analyses(model: Any, model_input: ModelInput, what: Sequence[str], given: Mapping[str, Any]) -> Record:
    """The records of the chosen analyses, by name. given: options of the command."""
    ids, config = model_input.ids.to(model.device), model.config.get_text_config(decoder=True)
    layers = given.get("layers")
    results: Record = {}
    if "conditioning" in what:
        lengths = _prefixes(given.get("lengths"), ids.shape[1])
        results["conditioning"] = condition_numbers(model, ids, lengths, layers=layers)
    if "hit_rate" in what:
        results["hit_rate"] = hit_rates(model, ids, model_input.queries, layers=layers)
        results["mean_hit_rate"] = average(results["hit_rate"], ())[0]
    if "jacobian" in what:
        results["jacobian"] = jacobians(model, ids, layers=layers)
    if "maps" in what:
        last = config.num_hidden_layers - 1
        drawn = sorted({0, (last + 1) // 2, last}) if layers is None else layers
        some = {"most_heads": MAP_HEADS, "bins": given.get("bins", 128)}
        results["maps"] = attention_maps(model, ids, layers=drawn, **some)
    return results


def _prefixes(lengths: Sequence[int] | None, tokens: int) -> list[int]:
    if lengths is None:
        # Powers of two up to 0.75 of the tokens, so that the last step is not tiny.
        return [*(n for n in (1 << i for i in range(5, 30)) if n <= 0.75 * tokens), tokens]
    if out_of_range := [n for n in lengths if n > tokens]:
        raise ValueError(f"--lengths must be at most {tokens}, the number of analysed tokens, got {out_of_range[0]}")
    return sorted(set(lengths))


def _write(out: Path, head: Record, results: Record) -> list[Path]:
    """Write numbers and figures for `lucid report`. Maps are large, so they have a file of their own."""
    records = {name: found for name, found in results.items() if name != "maps"}
    files = [write_record(out / "analysis.json", head | {"results": records, "figures": _figures(records)})]
    if maps := [_map_figure(record) for record in results.get("maps", ())]:
        files.append(write_whole(out / "maps.json", json.dumps(head | {"figures": maps}) + "\n"))
    return files


def _map_figure(record: Record) -> Record:
    """A and W of one head on one scale, as a figure of the report."""
    a, w = ([[float(f"{x:.5g}") for x in row] for row in record[name].tolist()] for name in ("softmax", "effective"))
    # The largest 0.5 % of the weights do not set the scale: the first rows of every map are full.
    sizes = sorted(abs(x) for values in (a, w) for row in values for x in row if x)
    limit = sizes[int(0.995 * (len(sizes) - 1))]
    tokens = record["borders"][:-1]
    panels = [
        {"name": name, "rows": tokens, "columns": tokens, "values": values}
        for name, values in (("softmax A", a), ("effective W = A P⁻¹", w))
    ]
    labels = {name: record[name] for name in ("layer", "row", "head", "attention")}
    axes = {"rows": {"label": "query of token"}, "columns": {"label": "value of token"}, "range": [-limit, limit]}
    title = f"Layer {record['layer']}, head {record['head']}"
    return {"kind": "heatmaps", "title": title, "signed": True, "numbers": False, "panels": panels} | axes | labels


def _figures(results: Record) -> list[Record]:
    """Figures of the report: κ against the length, and means over heads and queries against the layer."""
    figures: list[Record] = []
    if records := results.get("conditioning"):
        series = []
        for layer, members in _by_layer(records).items():
            x = sorted({record["length"] for record in members})
            y = [median(record["kappa"] for record in members if record["length"] == length) for length in x]
            series.append({"name": f"layer {layer}", "role": f"layer {layer}", "x": x, "y": y})
        axes: Record = {
            "x": {"label": "tokens", "log": True},
            "y": {"label": "κ₂(P), median of the heads", "log": True},
        }
        figures.append({"kind": "lines", "title": "Condition numbers", "series": series} | axes)
    for name, title, columns in (
        ("hit_rate", "Hit rates", MEASURES),
        ("jacobian", "Softmax Jacobian", ("off_diagonal", "query_jacobian")),
    ):
        if records := results.get(name):
            by_layer = _by_layer(records)
            series = []
            for column in columns:
                y = [_mean(members, column) for members in by_layer.values()]
                series.append({"name": column.replace("_", " "), "role": column, "x": list(by_layer), "y": y})
            axes = {"x": {"label": "layer"}, "y": {"label": "mean of the heads", "log": name == "jacobian"}}
            figures.append({"kind": "lines", "title": title, "series": series} | axes)
    return figures


def _by_layer(records: Sequence[Record]) -> dict[int, list[Record]]:
    layers = dict.fromkeys(record["layer"] for record in records)
    return {layer: [record for record in records if record["layer"] == layer] for layer in layers}


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [record[name] for record in records if record[name] is not None]
    return mean(values) if values else None


def summary(head: Record, results: Record) -> str:
    """A table with a line for every layer. head: checkpoint and input."""
    checkpoint, source = head["checkpoint"], head["input"]
    about = f"{checkpoint['name']} ({checkpoint['model_type']}, {checkpoint['attention']})"
    parts = [f"{about}, {source['tokens']} tokens: {source['about']}"]
    columns: dict[str, dict[int, str]] = {}
    for length in sorted({record["length"] for record in results.get("conditioning", ())}):
        of_length = [record for record in results["conditioning"] if record["length"] == length]
        columns[f"κ at {length}"] = {
            layer: f"{median(record['kappa'] for record in members):.4g}"
            for layer, members in _by_layer(of_length).items()
        }
    for name, measures in (("hit_rate", MEASURES), ("jacobian", ("off_diagonal", "query_jacobian"))):
        for measure in measures if name in results else ():
            means = {layer: _mean(members, measure) for layer, members in _by_layer(results[name]).items()}
            columns[measure] = {layer: "-" if mean is None else f"{mean:.4g}" for layer, mean in means.items()}
    if columns:
        layers = sorted({layer for column in columns.values() for layer in column})
        rows = [[str(layer), *(column.get(layer, "-") for column in columns.values())] for layer in layers]
        table = text_table([["layer", *columns], *rows])
        parts.append(f"κ: median of the heads; others: mean of the heads\n{table}")
    if records := results.get("disturbance"):
        changes: dict[tuple[str, str], list[str]] = {}
        for record in records:
            if chosen := record["layers"]:
                where = f"layer {chosen[0]}" if len(chosen) == 1 else f"{len(chosen)} layers"
                changes.setdefault((where, f"{record['sharpness']:.3g}"), []).append(f"{record['change']:+.4f}")
        rows = [["LUCID in", "sharpness", *(f"{name} keys" for name in dict.fromkeys(r["keys"] for r in records))]]
        rows += [[*where, *found] for where, found in changes.items()]
        title = f"change of the loss, {records[0]['loss']:.4f} nats, when layers become LUCID without training"
        parts.append(f"{title}\n{text_table(rows)}")
    return "\n\n".join(parts)
