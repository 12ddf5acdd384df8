"""The arguments of `lucid eval`, `lucid compare` and `lucid make-data`. Imports nothing heavy."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lucid_attention.models import DTYPES

from .cells import arguments, counts, names, ranges

# What `lucid make-data` makes.
KINDS = {
    "needles": "needles of RULER in a haystack, with the places of the answers",
    "babilong": "stories of bAbI in a long text",
    "longbench": "half of 2WikiMQA and of MultifieldQA",
    "qasper": "Qasper's training split",
    "qmsum": "QMSum's training split",
}


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid eval`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", help="folder with config.json and weights")
    add_shared_arguments(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder of the results (default: results/NAME-HASH); the same command resumes"
    )


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid compare`."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="checkpoints, or results of `lucid eval`; others are compared to the first",
    )
    add_shared_arguments(parser)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        default="results",
        help="holds a folder NAME-HASH of results for each checkpoint (default: results)",
    )


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid eval` and `lucid compare`: the tasks, their options, and how the model runs."""
    parser.add_argument(
        "--tasks", metavar="NAMES", type=names, default=(), help="names of tasks, as in sniah,mniah; list shows all"
    )
    for name, default, parse, text in arguments():
        default_text = "" if default in ((), "") else f" (default: {_shown(default)})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, type=_named(parse), metavar=name.upper(), help=text + default_text
        )
    parser.add_argument(
        "--mean-lengths",
        type=_named(ranges),
        default=(),
        metavar="RANGES",
        help="means over the lengths in these ranges, too, as in 2048-8192,2048-32768",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer for a checkpoint that has none")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="samples at a time (default: 1)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N samples of every cell")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype of the weights (default: as saved)")


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _named(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` under a readable name: argparse puts the name of the parser into its error message."""

    def read(text: str) -> Any:
        return parse(text)

    read.__name__ = {"counts": "list of numbers", "names": "list of names", "ranges": "list of ranges"}.get(
        parse.__name__, parse.__name__
    )
    return read


def make_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid make-data`."""
    kinds = "; ".join(f"{name}: {about}" for name, about in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=list(KINDS), help=kinds)
    parser.add_argument("out", metavar="OUT", type=Path, help=".jsonl file to be written")
    parser.add_argument(
        "--data-dir",
        metavar="FOLDER",
        help="folder with the files of LongBench or SCROLLS (default: the hub)",
    )
    samples = parser.add_argument_group("options of babilong and needles")
    samples.add_argument(
        "--tasks",
        type=names,
        metavar="LIST",
        help="stories of babilong (default: all, qa1 to qa5)",
    )
    samples.add_argument("--needles", type=_named(counts), metavar="LIST", help="numbers of needles (default: 4)")
    samples.add_argument(
        "--lengths",
        type=_named(counts),
        metavar="LIST",
        help="in tokens; 0 for stories of babilong without background (default: 0,1024,2048,4096)",
    )
    samples.add_argument("--samples", type=int, metavar="N", help="prompts for each task and length (default: 1000)")
    samples.add_argument("--seed", type=int, metavar="N", help="seed of the samples (default: 0)")
    samples.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer of the model that is to be trained")
    samples.add_argument(
        "--haystack", metavar="WHAT", help="noise, prose, essays, pg19, or a text file or folder (default: prose)"
    )
    samples.add_argument(
        "--babilong-hub",
        metavar="NAME",
        help="published stories instead of ours: RMT-team/babilong-train-5k-samples, or a folder with its data/",
    )
