"""`lucid demo`: what LUCID does and what it costs, in minutes, as a report."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ...report.page import write_report
from .command import columns
from .pool import JobsFailed, available_cores
from .progress import clock
from .study import run_together

PARTS = ("memory_update", "needle_grid", "condition_number", "operator_cost")
DEFAULT_OUT = Path("runs/demo")
REPORT = "report.html"
TITLE = "LUCID attention: the demonstration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid demo`."""
    parser.description = (
        "Train softmax attention, LUCID and the rest of the family side by side on memory update and multi-needle "
        "recall with several seeds, measure the condition number of P against length and the operator's cost against "
        "SDPA, and write a report. Ctrl-C stops it; the same command goes on."
    )
    parser.add_argument("--quick", action="store_true", help="two minutes: fewer attentions, seeds and lengths")
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        metavar="FOLDER",
        help=f"of records and report (default: {DEFAULT_OUT})",
    )


def run(args: argparse.Namespace) -> int:
    """`lucid demo`. Finished jobs stay whatever stops it."""
    scale, began = "quick" if args.quick else "demo", time.monotonic()
    command = "lucid demo --quick" if args.quick else "lucid demo"
    about = "two minutes" if args.quick else "nine minutes"
    print(f"About {about} on two cores; {available_cores()} here. Ctrl-C stops, the same command goes on.", flush=True)
    try:
        results = run_together(PARTS, scale, args.out, command)
        report = write_report(results, args.out / REPORT, TITLE)
    except (JobsFailed, ValueError) as error:
        print(f"lucid demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: finished jobs stay, the same command goes on from there", file=sys.stderr)
        return 130
    show(results)
    print(f"\n{clock(time.monotonic() - began)} in all. Report: {report}, the numbers: {report.with_suffix('.json')}")
    return 0


def show(results: list[dict[str, Any]]) -> None:
    """Claim, numbers and verdict of every part, and the main table of the first two."""
    for result in results[:2]:
        for each in result["tables"][:2]:
            print(f"\n{result['title']}: {each['title'][0].lower()}{each['title'][1:]}")
            print("\n".join(f"  {line}" for line in columns([each["columns"], *each["rows"]])))
    print()
    for result in results:
        print(f"{result['verdict'].upper():<14} {result['title']} (§{result['section']})")
        print(f"{'':<14} {result['ours']}")
