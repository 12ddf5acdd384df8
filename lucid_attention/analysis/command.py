"""`lucid analyze`: what the attention of a checkpoint does with a text."""

import argparse
import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ..data import DataError
from ..models.checkpoint import DTYPES, CheckpointError, checkpoint_name, load_model, load_tokenizer
from ..report.maps import draw_condition_numbers, draw_maps
from .conditioning import condition_numbers
from .hit_rate import average, hit_rates
from .jacobian import jacobians
from .maps import attention_maps
from .samples import hit_rates_of, read_samples
from .summary import summary
from .text import TASKS, Shown, from_source, from_task, from_text

WHAT = ("conditioning", "hit_rate", "jacobian", "maps")
FORMAT = 1
DEFAULTS = {"limit": 100, "last": 1, "bins": 128, "seed": 0, "dtype": "auto"}
# Of maps, if nothing was chosen: a picture of every head of a large model is a thousand pictures.
SOME_HEADS = 4
EPILOG = """\
examples:
  lucid analyze ./model --tokens-from stdlib --length 1024
      everything but the hit rate, on the first 1024 tokens of Python's standard library
  lucid analyze ./model --what conditioning --tokens-from stdlib --length 8192 --lengths 512,2048,8192
      κ(P) against the length, for every layer and head
  lucid analyze ./model --what hit_rate,maps --text prompt.txt --find "magic number is 4711" --layers 0,3
      how much weight the last token gives to that phrase, by softmax and after P⁻¹
  lucid analyze ./model --what hit_rate --samples needles.jsonl
      the same over many prompts: lucid make-data needles needles.jsonl --tokenizer ./model --lengths 1024
  lucid analyze ./runs/memory_update-lucid-0/model --task memory_update
      a model of a synthetic task, which has no tokenizer

For a softmax model κ is that of the P which LUCID would have, and both maps are the same.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid analyze`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{parser.epilog}\n\n{EPILOG}" if parser.epilog else EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and weights")
    parser.add_argument(
        "--what", type=_names, default=None, metavar="NAMES", help=f"some of {','.join(WHAT)} (default: all there is)"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--text", metavar="TEXT", help="file with a text, or the text itself")
    shown.add_argument("--tokens-from", metavar="SOURCE", help="corpus: stdlib, a file, a folder (default: stdlib)")
    shown.add_argument("--task", metavar="NAME", help=f"synthetic task instead of a text: {', '.join(TASKS)}")
    shown.add_argument(
        "--samples", metavar="FILE", help="prompts with the places of their answers, for hit_rate: of `lucid make-data`"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="of the samples, the first (default: 100)")
    parser.add_argument("--length", type=int, default=None, metavar="N", help="tokens to look at (512; of a task 65)")
    parser.add_argument(
        "--lengths", type=_counts, default=None, metavar="N,N", help="of prefixes, for κ (default: doubling from 32)"
    )
    parser.add_argument(
        "--find", action="append", default=[], metavar="PHRASE", help="what should be read, for hit_rate (repeatable)"
    )
    parser.add_argument("--last", type=int, metavar="N", help="how many of the last tokens ask (default: 1)")
    parser.add_argument("--layers", type=_counts, default=None, metavar="N,N", help="counted from 0 (default: all)")
    parser.add_argument("--heads", type=_counts, default=None, metavar="N,N", help="query heads (default: all)")
    parser.add_argument("--bins", type=int, metavar="N", help="largest size of maps (default: 128)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the item of a task (default: 0)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for a checkpoint that has none")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are saved)")
    parser.add_argument("--out", metavar="FOLDER", help="of numbers and pictures (default: runs/analysis/NAME)")
    parser.set_defaults(**DEFAULTS)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in WHAT]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(WHAT)}, got {text!r}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, such as 0,3, got {text!r}")
    return numbers


def run(args: argparse.Namespace) -> int:
    """`lucid analyze`. What stops it is said in one message."""
    try:
        folder = Path(args.checkpoint)
        out = Path(args.out) if args.out else Path("runs") / "analysis" / checkpoint_name(folder)
        model = load_model(folder, args.dtype)
        if args.samples is not None:
            return _of_samples(model, args, folder, out)
        shown = _shown(args, model)
        what = _what(args, shown)
        found = analyse(model, shown, what, args)
    except (ValueError, TypeError, DataError, OSError) as error:
        print(f"lucid analyze: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: nothing was written", file=sys.stderr)
        return 130
    head = {"format": FORMAT, "command": _command(args), "checkpoint": _about(model, folder)}
    ids = shown.ids[0].tolist()
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()
    head["input"] = {"about": shown.about, "tokens": len(ids), "sha256": digest}
    written = _write(out, head, found)
    print(summary(head, found))
    print(f"\n{', '.join(str(path) for path in written)}")
    return 0


def _of_samples(model: Any, args: argparse.Namespace, folder: Path, out: Path) -> int:
    """Hit rates over many prompts."""
    if args.what not in (None, ("hit_rate",)) or args.find:
        raise ValueError(
            "--samples is for --what hit_rate, and brings its own places: expected no others and no --find"
        )
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    samples = read_samples(Path(args.samples), args.limit)
    tokenizer = _tokenizer(args)
    records = hit_rates_of(model, tokenizer, samples, layers=args.layers, heads=args.heads)
    found = {"hit_rate": average(records), "mean_hit_rate": average(records, ())[0]}
    about = f"{len(samples)} samples of {Path(args.samples).name}"
    head = {"format": FORMAT, "command": _command(args), "checkpoint": _about(model, folder), "input": {"about": about}}
    written = _write(out, head, found)
    print(summary(head, found))
    print(f"\n{written[0]}")
    return 0


def _shown(args: argparse.Namespace, model: Any) -> Shown:
    if args.task is not None:
        if args.find or args.last != 1:
            raise ValueError("--task brings its own questions: --find and --last are for texts")
        return from_task(args.task, args.length or 65, args.seed, model.config.vocab_size)
    length = 512 if args.length is None else args.length
    if length < 2:
        raise ValueError(f"--length must be at least 2 tokens, got {length}")
    tokenizer = _tokenizer(args)
    options = (tokenizer, length, args.find, args.last)
    if args.text is not None:
        made = from_text(args.text, *options)
    else:
        made = from_source(args.tokens_from or "stdlib", *options)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    if int(made.ids.max()) >= vocabulary:
        raise ValueError(f"the tokenizer has ids up to {int(made.ids.max())}, the model {vocabulary}: it is another's")
    return made


def _tokenizer(args: argparse.Namespace) -> Any:
    try:
        return load_tokenizer(args.tokenizer or args.checkpoint)
    except CheckpointError as error:
        raise ValueError(f"{error}: give one with --tokenizer, or a synthetic task with --task") from error


def _what(args: argparse.Namespace, shown: Shown) -> tuple[str, ...]:
    if args.what is None:
        return tuple(name for name in WHAT if name != "hit_rate" or shown.queries)
    if "hit_rate" in args.what and not shown.queries:
        raise ValueError("--what hit_rate needs to know what should be read: give --find PHRASE, or --task NAME")
    return args.what


def analyse(model: Any, shown: Shown, what: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    """The records of every analysis that was asked for, by name."""
    ids, layers, heads = shown.ids.to(model.device), args.layers, args.heads
    found: dict[str, Any] = {}
    if "conditioning" in what:
        lengths = _prefixes(args.lengths, ids.shape[1])
        found["conditioning"] = condition_numbers(model, ids, lengths, layers=layers, heads=_groups(model, heads))
    if "hit_rate" in what:
        found["hit_rate"] = hit_rates(model, ids, shown.queries, layers=layers, heads=heads)
        found["mean_hit_rate"] = average(found["hit_rate"], ())[0]
    if "jacobian" in what:
        found["jacobian"] = jacobians(model, ids, layers=layers, heads=heads)
    if "maps" in what:
        config = model.config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        chosen = sorted({0, count // 2, count - 1}) if layers is None else layers
        # Two heads of differential attention make one map.
        maps = config.num_attention_heads // (2 if "diff" in getattr(config, "attention", ()) else 1)
        few = range(min(SOME_HEADS, maps)) if heads is None else heads
        found["maps"] = attention_maps(model, ids, layers=chosen, heads=few, bins=args.bins)
    return found


def _groups(model: Any, heads: tuple[int, ...] | None) -> list[int] | None:
    """The key/value heads of query heads."""
    config = model.config.get_text_config(decoder=True)
    shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return None if heads is None else sorted({head // (config.num_attention_heads // shared) for head in heads})


def _prefixes(lengths: tuple[int, ...] | None, tokens: int) -> list[int]:
    if lengths is None:
        # The last step is no tiny one.
        return [*(n for n in (1 << i for i in range(5, 30)) if n <= 0.75 * tokens), tokens]
    longer = [n for n in lengths if not 1 <= n <= tokens]
    if longer:
        raise ValueError(f"--lengths must be 1 to {tokens}, the tokens that are looked at, got {longer[0]}")
    return sorted(set(lengths))


def _about(model: Any, folder: Path) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    attention = getattr(config, "attention", None) or getattr(config, "_attn_implementation", None)
    return {"name": checkpoint_name(folder), "model_type": config.model_type, "attention": attention}


def _command(args: argparse.Namespace) -> str:
    """As it could be typed on any machine: paths that begin at the root are shortened to names."""
    words = ["lucid", "analyze", _short(args.checkpoint)]
    for name, value in vars(args).items():
        if name in ("checkpoint", "out") or value in (None, [], DEFAULTS.get(name)):
            continue
        for each in value if isinstance(value, list) else [value]:
            text = ",".join(map(str, each)) if isinstance(each, tuple) else _short(str(each))
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)


def _short(text: str) -> str:
    path = Path(text)
    return path.name if path.is_absolute() and path.exists() else text


def _write(out: Path, head: dict[str, Any], found: dict[str, Any]) -> list[Path]:
    """Numbers and pictures. Maps are large, and have a file of their own."""
    out.mkdir(parents=True, exist_ok=True)
    title = f"{head['checkpoint']['name']}, {head['input'].get('tokens', 'several')} tokens"
    written = [out / "analysis.json"]
    results = {name: records for name, records in found.items() if name != "maps"}
    written[0].write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
    if "conditioning" in found:
        written.append(out / "condition_numbers.png")
        draw_condition_numbers(found["conditioning"], written[-1], title)
    if "maps" in found:
        records = [_listed(each) for each in found["maps"]]
        written.append(out / "maps.json")
        written[-1].write_text(json.dumps(head | {"maps": records}) + "\n")
        for layer in dict.fromkeys(each["layer"] for each in records):
            written.append(out / f"maps_layer_{layer}.png")
            draw_maps([each for each in records if each["layer"] == layer], written[-1], f"{title}, layer {layer}")
    return written


def _listed(record: dict[str, Any]) -> dict[str, Any]:
    """A map as lists of numbers with five digits."""
    lists = {
        name: [[float(f"{x:.5g}") for x in line] for line in record[name].tolist()] for name in ("softmax", "effective")
    }
    return record | lists
