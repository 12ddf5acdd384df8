"""The arguments of `lucid analyze`. Imports nothing heavy."""

import argparse

from lucid_attention.models import DTYPES

WHAT = ("conditioning", "hit_rate", "jacobian", "maps", "disturbance")
# The names of `TASKS` in `inputs`.
TASKS = ("memory_update", "needles")
DEFAULTS = {"limit": 100, "last": 1, "bins": 128, "seed": 0, "dtype": "auto", "device": "auto"}
EPILOG = """\
examples:
  lucid analyze ./model --tokens-from stdlib --length 1024
      all analyses but the hit rate, on the first 1024 tokens of Python's standard library
  lucid analyze ./model --what conditioning --tokens-from stdlib --length 8192 --lengths 512,2048,8192
      κ(P) against the length, for every layer and head
  lucid analyze ./model --what hit_rate,maps --text prompt.txt --find "magic number is 4711" --layers 0,3
      how much weight the last token gives to that phrase, by softmax and after P⁻¹
  lucid analyze ./model --what hit_rate --samples needles.jsonl
      the same over many prompts, written by: lucid make-data needles needles.jsonl --tokenizer ./model --lengths 1024
  lucid analyze ./model --what disturbance --length 1024 --sharpnesses 64,32,16,8
      the loss when one layer, or all of them, become LUCID without training: which layers to convert, where to start
  lucid analyze ./runs/memory_update-lucid-0/model --task memory_update
      a model of a synthetic task, which has no tokenizer

For a softmax model κ is that of the P that LUCID would have, and both maps are equal.
"""


def analyze_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid analyze`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{parser.epilog}\n\n{EPILOG}" if parser.epilog else EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and weights")
    parser.add_argument(
        "--what",
        type=_names,
        default=None,
        metavar="NAMES",
        help=f"some of {','.join(WHAT)} (default: all that apply, without disturbance)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", metavar="TEXT", help="file with a text, or the text itself; what looks like a file must be one"
    )
    source.add_argument("--tokens-from", metavar="SOURCE", help="corpus: stdlib, a file, a folder (default: stdlib)")
    source.add_argument("--task", metavar="NAME", help=f"synthetic task instead of a text: {', '.join(TASKS)}")
    source.add_argument(
        "--samples",
        metavar="FILE",
        help="prompts with the places of their answers, from `lucid make-data`: for hit_rate",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N samples (default: 100)")
    parser.add_argument(
        "--length", type=int, default=None, metavar="N", help="tokens to analyse (default: 512, of a task 65)"
    )
    parser.add_argument(
        "--lengths",
        type=_counts,
        default=None,
        metavar="N,N",
        help="lengths of prefixes, for κ (default: doubling from 32)",
    )
    parser.add_argument(
        "--strengths",
        type=_numbers,
        default=None,
        metavar="S,S",
        help="strengths of all layers, for disturbance (default: 0.1,0.25,0.5)",
    )
    parser.add_argument(
        "--sharpnesses",
        type=_numbers,
        default=None,
        metavar="C,C",
        help="sharpnesses of all layers, for disturbance (default: 8, 4, 2 and 1 times √D)",
    )
    parser.add_argument(
        "--find",
        action="append",
        default=[],
        metavar="PHRASE",
        help="phrase that the queries should read, for hit_rate (repeatable)",
    )
    parser.add_argument("--last", type=int, metavar="N", help="the last N tokens ask, for hit_rate (default: 1)")
    parser.add_argument("--layers", type=_counts, default=None, metavar="N,N", help="counted from 0 (default: all)")
    parser.add_argument("--heads", type=_counts, default=None, metavar="N,N", help="query heads (default: all)")
    parser.add_argument("--bins", type=int, metavar="N", help="rows and columns of the largest map (default: 128)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the task's item (default: 0)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="folder with a tokenizer (default: the checkpoint)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as saved)")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1 and so on (default: an accelerator if there is one)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder for numbers and pictures (default: runs/analysis/NAME)")
    parser.set_defaults(**DEFAULTS)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in WHAT]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(WHAT)}, got {text!r}")
    return names


def _counts(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, such as 0,3, got {text!r}")
    return numbers


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (-1.0,)
    if not all(0 < number < float("inf") for number in numbers):
        raise argparse.ArgumentTypeError(f"expected positive numbers separated by commas, such as 64,16, got {text!r}")
    return numbers
