"""`lucid demo`: train, measure and write a report, in a few minutes."""

import argparse
import sys
import time
from typing import Any

from ...processes import available_cores
from ...report.page import write_report
from .command import table_lines
from .pool import JobsFailed, clock
from .scale import DEMO, QUICK
from .study import run_together

PARTS = ("memory_update", "needle_grid", "condition_number", "operator_cost")
REPORT = "report.html"
TITLE = "LUCID attention: the demonstration"


def run(args: argparse.Namespace) -> int:
    """`lucid demo`. Finished jobs stay when it is stopped."""
    scale, start = DEMO if args.full else QUICK, time.monotonic()
    command = "lucid demo --full" if args.full else "lucid demo"
    print(f"About {scale.about}; {available_cores()} here. Ctrl-C stops, the same command continues.", flush=True)
    try:
        report = args.out / REPORT
        results = run_together(
            PARTS, scale, args.out, command, then=lambda results: write_report(results, report, TITLE)
        )
    except (JobsFailed, ValueError) as error:
        print(f"lucid demo: error: {error}", file=sys.stderr)
        return 1
    show(results)
    print(f"\n{clock(time.monotonic() - start)} in all. Report: {report}")
    if not args.full:
        print(f"Every attention, with several seeds: lucid demo --full, or make demo ARGS=--full ({DEMO.about})")
    return 0


def show(results: list[dict[str, Any]]) -> None:
    """Print the main tables of the first two parts, and the verdict and numbers of every part."""
    for result in results[:2]:
        for table in result["tables"][:2]:
            print(f"\n{result['title']}: {table['title'][0].lower()}{table['title'][1:]}")
            print("\n".join(f"  {line}" for line in table_lines(table)))
    print()
    for result in results:
        print(f"{result['verdict'].upper():<14} {result['title']} (§{result['section']})")
        print(f"{'':<14} {result['ours']}")
