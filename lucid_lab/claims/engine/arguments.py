"""The arguments of `lucid experiment` and `lucid demo`. Imports nothing heavy."""

import argparse
from pathlib import Path

from .scale import DEMO, SCALES, SMALL

EXPERIMENTS_OUT = Path("runs/experiments")
DEMO_OUT = Path("runs/demo")


def experiment_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid experiment`."""
    parser.add_argument("names", metavar="NAME", nargs="+", help="one or several of `lucid experiment list`, or all")
    scales = [f"{scale.name}: {scale.about}{' (default)' if scale is SMALL else ''}" for scale in SCALES.values()]
    parser.add_argument("--scale", choices=tuple(SCALES), default=SMALL.name, help="; ".join(scales))
    parser.add_argument(
        "--out",
        type=Path,
        default=EXPERIMENTS_OUT,
        metavar="FOLDER",
        help=f"folder of the records (default: {EXPERIMENTS_OUT})",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="FOLDER",
        help="checkpoint for `pretrained`, such as one of tools/get_smollm2.py (--scale smoke has its own, a tiny one)",
    )
    parser.add_argument(
        "--texts",
        default="",
        metavar="FOLDER",
        help="long .txt files for `pretrained`, such as those of tools/get_texts.py",
    )
    parser.add_argument("--processes", type=_count, metavar="N", help="jobs at a time (default: one per core)")
    parser.add_argument("--restart", action="store_true", help="run finished jobs again")
    parser.add_argument(
        "--dry-run", action="store_true", help="print and check the jobs or commands, without running them"
    )
    parser.add_argument(
        "--judge",
        action="store_true",
        help="with --scale paper or rehearsal: run nothing, and judge what its commands have written so far",
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid demo`."""
    parser.description = (
        "Train softmax attention, LUCID and DeltaNet side by side on two tasks (overwritten keys, many needles), "
        "measure the condition number of P against length and the operator's cost against SDPA, and write a report. "
        "Ctrl-C stops it; the same command continues."
    )
    parser.add_argument(
        "--full", action="store_true", help=f"every attention, several seeds, more lengths: {DEMO.about}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEMO_OUT,
        metavar="FOLDER",
        help=f"folder of records and report (default: {DEMO_OUT})",
    )
