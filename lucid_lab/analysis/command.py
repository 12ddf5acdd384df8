"""`lucid analyze`: run the analyses on a checkpoint and a text; write numbers and pictures, print a summary."""

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from tqdm import tqdm

from lucid_attention.files import write_record, write_whole
from lucid_attention.models.checkpoint import (
    CheckpointError,
    check_checkpoint,
    checkpoint_name,
    load_config,
    load_model,
    load_tokenizer,
)
from lucid_attention.models.limits import check_input_fits

from ..data import DataError
from ..devices import find_device
from ..locks import locked
from ..report.pictures import draw_condition_numbers, draw_maps
from ..tables import text_table
from .arguments import DEFAULTS, WHAT
from .conditioning import condition_numbers
from .disturbance import disturbances
from .hit_rate import MEASURES, Record, average, hit_rates, sample_hit_rates
from .inputs import ModelInput, from_source, from_task, from_text, read_samples
from .jacobian import jacobians
from .maps import attention_maps
from .progress import Progress, silent
from .together import disturbances_together

FORMAT = 1
# The longest text: κ of a head takes time that grows with the square of the length.
LONGEST = 131_072
# From this length on, the first line of the progress comes at once; others after this many seconds in a log.
LONG, EVERY = 8192, 10.0
# Rows and columns of the largest map: maps.json holds every number of them.
MOST_BINS = 1024
# Heads of a layer whose maps are drawn by default: a large model has a thousand heads.
MAP_HEADS = 4


def run(args: argparse.Namespace) -> int:
    """`lucid analyze`. An error is printed in one message."""
    try:
        _check_arguments(args)
        folder = Path(args.checkpoint)
        out = Path(args.out) if args.out else Path("runs") / "analysis" / checkpoint_name(folder)
        check_checkpoint(folder)
        if args.samples is not None:
            return _analyse_samples(args, folder, out)
        model_input = _model_input(args, load_config(folder).get_text_config(decoder=True).vocab_size)
        what = _what(args, model_input)
        check_input_fits(folder, model_input.ids.shape[1], "--length", dtype=args.dtype)
        device = find_device(args.device)
        # The lock is taken before the work, so that a folder that cannot be written is refused first.
        with locked(out, "lucid analyze"):
            model = load_model(folder, args.dtype).to(device)
            ids = model_input.ids[0].tolist()
            digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
            about = {"about": model_input.about, "tokens": len(ids), "sha256": digest}
            # Before the analyses: disturbance changes the attention of the model.
            head = _head(args, model, folder, about)
            with _progress(len(ids), device) as progress:
                results = analyse(model, model_input, what, args, progress)
            _finish(out, head, results)
    except (ValueError, TypeError, DataError, torch.linalg.LinAlgError) as error:
        print(f"lucid analyze: error: {error}", file=sys.stderr)
        return 1
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Refuse what can be refused before the model is loaded."""
    if args.length is not None and not 2 <= args.length <= LONGEST:
        raise ValueError(f"--length must be 2 to {LONGEST} tokens, got {args.length}")
    if max(args.lengths or (0,)) > LONGEST:
        raise ValueError(f"--lengths must be at most {LONGEST} tokens, got {max(args.lengths)}")
    if not 1 <= args.bins <= MOST_BINS:
        raise ValueError(f"--bins must be 1 to {MOST_BINS}, got {args.bins}")
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")


def _analyse_samples(args: argparse.Namespace, folder: Path, out: Path) -> int:
    """Hit rates over many prompts."""
    if args.what not in (None, ("hit_rate",)) or args.find:
        raise ValueError(
            "--samples is for --what hit_rate and has its own spans: expected no other --what and no --find"
        )
    samples = read_samples(Path(args.samples), args.limit)
    tokenizer = _tokenizer(args)
    prompts = [sample["prompt"] for sample in samples]
    longest = max(len(ids) for ids in tokenizer(prompts, verbose=False)["input_ids"])
    check_input_fits(folder, longest, "the prompts of --samples", dtype=args.dtype)
    device = find_device(args.device)
    options = {"layers": args.layers, "heads": args.heads}
    with locked(out, "lucid analyze"):
        model = load_model(folder, args.dtype).to(device)
        with _progress(longest, device) as progress:
            records = sample_hit_rates(model, tokenizer, samples, **options, progress=progress)
        results = {"hit_rate": average(records), "mean_hit_rate": average(records, ())[0]}
        about = {"about": f"{len(samples)} samples of {Path(args.samples).name}"}
        _finish(out, _head(args, model, folder, about), results)
    return 0


def _head(args: argparse.Namespace, model: Any, folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The command, checkpoint and input: the first entries of every file."""
    return {"format": FORMAT, "command": _command(args), "checkpoint": _about(model, folder), "input": about}


def _finish(out: Path, head: dict[str, Any], results: dict[str, Any]) -> None:
    files = _write(out, head, results)
    print(summary(head, results))
    print(f"\n{', '.join(str(path) for path in files)}")


def _model_input(args: argparse.Namespace, vocabulary: int) -> ModelInput:
    if args.task is not None:
        if args.find or args.last != 1:
            raise ValueError("--task brings its own questions: --find and --last are for texts")
        return from_task(args.task, 65 if args.length is None else args.length, args.seed, vocabulary)
    length = 512 if args.length is None else args.length
    tokenizer = _tokenizer(args)
    options = (tokenizer, length, args.find, args.last)
    if args.text is not None:
        model_input = from_text(args.text, *options)
    else:
        model_input = from_source(args.tokens_from or "stdlib", *options)
    largest = int(model_input.ids.max())
    if largest >= vocabulary:
        raise ValueError(f"the tokenizer must be that of the model, with ids below {vocabulary}, got id {largest}")
    return model_input


def _tokenizer(args: argparse.Namespace) -> Any:
    try:
        return load_tokenizer(args.tokenizer or args.checkpoint)
    except CheckpointError as error:
        raise ValueError(f"{error}: give one with --tokenizer, or a synthetic task with --task") from error


def _what(args: argparse.Namespace, model_input: ModelInput) -> tuple[str, ...]:
    if args.what is None:
        # Disturbance runs the model once for every layer.
        return tuple(name for name in WHAT if name != "disturbance" and (name != "hit_rate" or model_input.queries))
    if "hit_rate" in args.what and not model_input.queries:
        raise ValueError("--what hit_rate needs to know what should be read: give --find PHRASE, or --task NAME")
    return args.what


@contextmanager
def _progress(tokens: int, device: Any) -> Iterator[Progress]:
    """A line on stderr that says what is being done, and for how long. A long text gets it at once."""
    bar = tqdm(
        desc=f"running the model over {tokens} tokens on {device}",
        bar_format="{desc} [{elapsed}]",
        delay=0 if tokens >= LONG else 5,
        mininterval=0.5 if sys.stderr.isatty() else EVERY,
        miniters=1,
        leave=False,
    )

    def progress(what: str) -> None:
        bar.set_description_str(what, refresh=False)
        bar.update()

    with bar:
        yield progress


def analyse(
    model: Any, model_input: ModelInput, what: tuple[str, ...], args: argparse.Namespace, progress: Progress = silent
) -> dict[str, Any]:
    """The records of the chosen analyses, by name."""
    ids, layers, heads = model_input.ids.to(model.device), args.layers, args.heads
    results: dict[str, Any] = {}

    def of(name: str) -> Progress:
        progress(f"{name}: running the model")
        return lambda step: progress(f"{name}: {step}")

    if "conditioning" in what:
        lengths = _prefixes(args.lengths, ids.shape[1])
        groups = _groups(model, heads)
        results["conditioning"] = condition_numbers(
            model, ids, lengths, layers=layers, heads=groups, progress=of("conditioning")
        )
    if "hit_rate" in what:
        results["hit_rate"] = hit_rates(
            model, ids, model_input.queries, layers=layers, heads=heads, progress=of("hit_rate")
        )
        results["mean_hit_rate"] = average(results["hit_rate"], ())[0]
    if "jacobian" in what:
        results["jacobian"] = jacobians(model, ids, layers=layers, heads=heads, progress=of("jacobian"))
    if "maps" in what:
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        chosen = sorted({0, count // 2, count - 1}) if layers is None else layers
        options: dict[str, Any] = {"most_heads": MAP_HEADS, "bins": args.bins, "progress": of("maps")}
        results["maps"] = attention_maps(model, ids, layers=chosen, heads=heads, **options)
    if "disturbance" in what:
        # The last one: it changes the settings of the model.
        changes: dict[str, Any] = {"strengths": args.strengths, "sharpnesses": args.sharpnesses}
        changes = {name: values for name, values in changes.items() if values is not None}
        report = of("disturbance")
        records = disturbances(model, ids, layers=layers, **changes, progress=report)
        results["disturbance"] = [*records, *disturbances_together(model, ids, records, progress=report)]
    return results


def _groups(model: Any, heads: tuple[int, ...] | None) -> list[int] | None:
    """The key/value heads of query heads."""
    config = model.config.get_text_config(decoder=True)
    shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return None if heads is None else sorted({head // (config.num_attention_heads // shared) for head in heads})


def _prefixes(lengths: tuple[int, ...] | None, tokens: int) -> list[int]:
    if lengths is None:
        # Powers of two up to 0.75 of the tokens, so that the last step is not tiny.
        return [*(n for n in (1 << i for i in range(5, 30)) if n <= 0.75 * tokens), tokens]
    out_of_range = [n for n in lengths if not 1 <= n <= tokens]
    if out_of_range:
        raise ValueError(f"--lengths must be 1 to {tokens}, the number of analysed tokens, got {out_of_range[0]}")
    return sorted(set(lengths))


def _about(model: Any, folder: Path) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    attention = getattr(config, "attention", None) or getattr(config, "_attn_implementation", None)
    return {"name": checkpoint_name(folder), "model_type": config.model_type, "attention": attention}


def _command(args: argparse.Namespace) -> str:
    """The command line, for any machine: absolute paths are shortened to their names."""
    words = ["lucid", "analyze", _short(args.checkpoint)]
    for name, value in vars(args).items():
        if name in ("checkpoint", "out") or value in (None, [], DEFAULTS.get(name)):
            continue
        for item in value if isinstance(value, list) else [value]:
            text = ",".join(map(str, item)) if isinstance(item, tuple) else _short(str(item))
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def _short(text: str) -> str:
    path = Path(text)
    return path.name if path.is_absolute() and path.exists() else text


def _write(out: Path, head: dict[str, Any], results: dict[str, Any]) -> list[Path]:
    """Write numbers and pictures. Maps are large, so they have a file of their own."""
    title = f"{head['checkpoint']['name']}, {head['input'].get('tokens', 'several')} tokens"
    numbers = {name: records for name, records in results.items() if name != "maps"}
    files = [write_record(out / "analysis.json", head | {"results": numbers})]
    if "conditioning" in results:
        files.append(out / "condition_numbers.png")
        draw_condition_numbers(results["conditioning"], files[-1], title)
    if "maps" in results:
        maps = [_listed(record) for record in results["maps"]]
        files.append(write_whole(out / "maps.json", json.dumps(head | {"maps": maps}) + "\n"))
        for layer in dict.fromkeys(record["layer"] for record in maps):
            files.append(out / f"maps_layer_{layer}.png")
            draw_maps([record for record in maps if record["layer"] == layer], files[-1], f"{title}, layer {layer}")
    return files


def _listed(record: dict[str, Any]) -> dict[str, Any]:
    """A map as lists of numbers with five digits."""
    lists = {
        name: [[float(f"{x:.5g}") for x in line] for line in record[name].tolist()] for name in ("softmax", "effective")
    }
    return record | lists


def summary(head: Record, results: dict[str, Any]) -> str:
    """A table for every analysis, with a line for every layer. head: checkpoint and input, as in `_head`."""
    checkpoint, source = head["checkpoint"], head["input"]
    size = f"{source['tokens']} tokens: " if "tokens" in source else ""
    parts = [f"{checkpoint['name']} ({checkpoint['model_type']}, {checkpoint['attention']}), {size}{source['about']}"]
    if "conditioning" in results:
        rows = _condition_rows(results["conditioning"])
        parts.append(f"κ(P) by length, median (largest) of the heads\n{text_table(rows)}")
    if "hit_rate" in results:
        rows = _by_layer(results["hit_rate"], {name: _mean_of(name) for name in MEASURES}, "{:.4f}")
        rows.append(["all", *(f"{results['mean_hit_rate'][name]:.4f}" for name in MEASURES)])
        parts.append(f"hit rate: A, W and |W|/Σ|W| on what should be read; negative share of |W|\n{text_table(rows)}")
    if "jacobian" in results:
        columns = {"off-diagonal": _mean_of("off_diagonal"), "‖∂o/∂q‖": _mean_of("query_jacobian")}
        rows = _by_layer(results["jacobian"], columns, "{:.3g}")
        parts.append(f"softmax Jacobian, mean of the heads\n{text_table(rows)}")
    if "disturbance" in results:
        rows = _disturbance_rows(results["disturbance"])
        parts.append(f"loss when layers become LUCID, without training, in nats\n{text_table(rows)}")
    return "\n\n".join(parts)


def _disturbance_rows(records: Sequence[Record]) -> list[list[str]]:
    rows = [["LUCID in", "strength", "sharpness", "loss", "change"]]
    every = max(len(record["layers"]) for record in records)
    for record in records:
        layers = record["layers"]
        several = f"{len(layers)} layers" if len(layers) == every else f"the {len(layers)} cheapest"
        where = f"layer {layers[0]}" if len(layers) == 1 else several if layers else "none (softmax)"
        settings = [f"{record[name]:.3g}" if layers else "" for name in ("strength", "sharpness")]
        rows.append([where, *settings, f"{record['loss']:.4f}", f"{record['change']:+.4f}" if layers else ""])
    return rows


def _condition_rows(records: Sequence[Record]) -> list[list[str]]:
    lengths = sorted({record["length"] for record in records})
    rows = [["layer", *map(str, lengths), "‖P⁻¹‖"]]
    for layer in dict.fromkeys(record["layer"] for record in records):
        members = [record for record in records if record["layer"] == layer]
        cells = [[record["kappa"] for record in members if record["length"] == length] for length in lengths]
        kappas = [f"{median(cell):.4g} ({max(cell):.4g})" if cell else "" for cell in cells]
        rows.append([str(layer), *kappas, f"{max(record['inverse_norm'] for record in members):.4f}"])
    return rows


Column = Callable[[Sequence[Record]], float | None]


def _mean_of(name: str) -> Column:
    def column(records: Sequence[Record]) -> float | None:
        values = [record[name] for record in records if record[name] is not None]
        return mean(values) if values else None

    return column


def _by_layer(records: Sequence[Record], columns: dict[str, Column], number: str) -> list[list[str]]:
    rows = [["layer", *columns]]
    for layer in dict.fromkeys(record["layer"] for record in records):
        values = [column([record for record in records if record["layer"] == layer]) for column in columns.values()]
        rows.append([str(layer), *("-" if value is None else number.format(value) for value in values)])
    return rows
