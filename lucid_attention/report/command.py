"""`lucid report`: results of experiments as a page."""

import argparse
import sys
from pathlib import Path

from .markdown import write_markdown
from .page import TITLE
from .records import ReportError, find_results
from .write import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid report`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="result.json files, or folders that are searched for them"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="HTML page (default: report.html); JSON goes beside it"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables as Markdown as well")
    parser.add_argument("--title", default=TITLE, help=f"of the page (default: {TITLE})")


def run(args: argparse.Namespace) -> int:
    """`lucid report`. Without --out and --markdown the page is report.html."""
    try:
        results = find_results(args.runs)
        if args.markdown is not None:
            print(write_markdown(results, args.markdown))
        if args.out is not None or args.markdown is None:
            out = write_report(results, args.out or Path("report.html"), args.title)
            count = f"{len(results)} experiment{'' if len(results) == 1 else 's'}"
            print(f"{out}: {count}; numbers in {out.with_suffix('.json')}")
    except (ReportError, OSError) as error:
        print(f"lucid report: error: {error}", file=sys.stderr)
        return 1
    return 0
