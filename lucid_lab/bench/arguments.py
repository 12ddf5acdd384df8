"""The arguments of `lucid bench`. Imports nothing heavy."""

import argparse
import textwrap
from pathlib import Path

OUT = Path("bench_results")
# Every benchmark of `command.BENCHMARKS`: what it measures, and how long it takes on two cores.
CATALOGUE = {
    "solve": (
        "attention over a whole sequence in float32, forward and forward+backward, next to torch's SDPA",
        "about 22 minutes with one thread (two thirds of it for N = 16384), 8 with a second thread count",
    ),
    "bf16": ("the same in bfloat16", "about 2 minutes if the CPU has no 16-bit products, else less"),
    "decode": ("one step of decoding next to two standard decoders", "half a minute for each thread count"),
    "memory": ("peak memory of one call, and two lengths that only linear memory reaches", "about 2 minutes"),
    "growth": ("time and peak memory against the length, drawn", "about 2 minutes"),
    "accuracy": ("error against the dense solve in float64", "half a minute"),
    "path": ("PaTH and LUCID-PaTH over a whole sequence next to SDPA", "about 3 minutes for each thread count"),
    "path_decode": ("decoding with PaTH and LUCID-PaTH", "about a minute for each thread count"),
    "path_memory": ("peak memory of PaTH and LUCID-PaTH", "about a minute and a half"),
    "linear": ("DeltaNet, Gated DeltaNet, GLA and GSA against the length, drawn", "about 5 minutes"),
    "model_training": (
        "a training step of Gemma 3 and Qwen 2 in their true widths",
        "about 15 minutes with two threads; only the largest thread count runs",
    ),
    "model_decode": ("one new token of these models and of the paper's", "about 7 minutes for each thread count"),
    "small_training": ("a training step of our own decoder, as in the recipe tiny_lm", "about a minute"),
    "serving": (
        "requests of different lengths in continuous batching, next to sdpa",
        "about 3 minutes for each thread count",
    ),
    "whole_training": (
        "a training step of whole models, every layer and the vocabulary, on --device",
        "about 12 minutes on a GPU; not in --all",
    ),
    "whole_decode": (
        "100 new tokens of whole models at a context of 32K, on --device",
        "about 5 minutes on a GPU; not in --all",
    ),
}
# The benchmarks that run on any device.
ON_DEVICE = ("whole_training", "whole_decode")


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n\n".join(filter(None, (_catalogue(), parser.epilog)))
    parser.add_argument(
        "names", nargs="*", metavar="BENCHMARK", help="benchmarks to run (below); without any, a quick look is printed"
    )
    parser.add_argument(
        "--all", action="store_true", help="run all benchmarks but whole_*: about 80 minutes on two cores"
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        metavar="N",
        help="thread counts to run with (default: 1; for --all 1 2). bf16, memory, growth, accuracy, path_memory and "
        "linear use the first one only, model_training the largest",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help=f"device of {' and '.join(ON_DEVICE)}: cpu, cuda, cuda:1 (default: an accelerator if there is one)",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: a test that benchmarks run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"for results.json, results.md and pictures (default: {OUT}). Results that it holds stay, if they are "
        "of this machine and of the same code",
    )
    parser.add_argument("--resume", action="store_true", help="skip the cases whose results are in --out")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="put the tables of --out into the pages in docs/ of a checkout, beside those of other machines",
    )


def _catalogue() -> str:
    parts = ["benchmarks (durations on two cores):"]
    for name, (about, duration) in CATALOGUE.items():
        text = f"{name:15}{about}; {duration}"
        parts.append(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent=" " * 17))
    explanation = (
        "Results are ratios within one run: a slow machine does not change them, a busy one does, above all with "
        "several threads. Before anything is timed, every contestant must agree with the defining equation in "
        "float64; otherwise the run stops with exit code 1. The exit code is also 1 if memory is not linear in the "
        "length. Other results over their limit are reported and are no error; results.md describes every "
        "measurement with its limits. Some virtual machines need a setting for bfloat16, which `make bench` finds."
    )
    return "\n".join(parts) + "\n\n" + textwrap.fill(explanation, 100)
