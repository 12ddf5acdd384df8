"""The arguments of `lucid report`. Imports nothing heavy."""

import argparse
from pathlib import Path

from .page import RUNS_TITLE, TITLE
from .records import RESULT
from .runs import EVALUATION, RECIPE


def report_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid report`."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="folders of `lucid experiment`, `lucid train` and `lucid eval`, searched at any depth, or their files "
        f"({RESULT}, {RECIPE}, {EVALUATION})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="HTML page (default: report.html); JSON goes beside it"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables as Markdown as well")
    parser.add_argument("--title", help=f"title of the page (default: {TITLE}; without experiments: {RUNS_TITLE})")
