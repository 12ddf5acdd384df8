"""`lucid experiment`: a claim of the paper, tested."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .full_scale import run_steps
from .jobs import Store
from .pool import JobsFailed
from .progress import clock
from .result import RESULT
from .steps import check_steps
from .study import EXPERIMENTS, JOBS, SCALES, ExperimentError, load, run_experiment

DEFAULT_OUT = Path("runs/experiments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid experiment`."""
    parser.add_argument("names", metavar="NAME", nargs="+", help="one or several of `lucid experiment list`, or all")
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="small",
        help="smoke: does it run (seconds); small: minutes on two cores, several seeds, a verdict (default); "
        "paper: the full recipe, for a cluster",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="FOLDER", help=f"of the records (default: {DEFAULT_OUT})"
    )
    parser.add_argument("--processes", type=_count, metavar="N", help="jobs at a time (default: one a core)")
    parser.add_argument("--restart", action="store_true", help="do finished jobs again")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would run, checked as far as it can be, and stop"
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """`lucid experiment`. Finished jobs stay whatever stops it."""
    try:
        if args.names == ["list"]:
            list_experiments()
            return 0
        names = list(EXPERIMENTS) if args.names == ["all"] else args.names
        for name in names:
            load(name)
        for name in names:
            code = _one(name, args)
            if code:
                return code
    except (ExperimentError, JobsFailed, ValueError) as error:
        print(f"lucid experiment: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: finished jobs stay, the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def _one(name: str, args: argparse.Namespace) -> int:
    if args.scale == "paper" and (args.restart or args.processes):
        raise ValueError("--restart and --processes are not for --scale paper: its commands have their own")
    if args.dry_run:
        dry_run(name, args.scale, args.out)
        return 0
    if args.scale == "paper":
        return run_steps(name, args.out)
    print(f"{name} ({args.scale}): {load(name).CLAIM.title}", flush=True)
    result = run_experiment(name, args.scale, args.out, processes=args.processes, restart=args.restart)
    show(result)
    print(f"  {args.out / f'{name}-{args.scale}' / RESULT}; `lucid report {args.out}` draws it")
    return 0


def list_experiments() -> None:
    """A claim a line, with where it stands in the paper."""
    for name in EXPERIMENTS:
        claim = load(name).CLAIM
        # Not everything is in the paper.
        where = f"§{claim.section}" if claim.section[0] in "A1234" else "new"
        print(f"{name:<18} {where:<5} {claim.title}")
        print(f"{'':<18} {'':<5} paper: {claim.paper}")


def dry_run(name: str, scale: str, out: Path) -> None:
    """What would run. Commands of the paper's scale are checked as they would be when they run."""
    if scale == "paper":
        steps = load(name).paper()
        check_steps(steps)
        hours = [step.gpu_hours() for step in steps]
        for step, each in zip(steps, hours, strict=True):
            print(step.line + ("" if each is None else f"   # about {each:,.0f} GPU hours"))
        print(f"{name}: {len(steps)} commands, about {sum(filter(None, hours)):,.0f} hours of an H100 for training")
        return
    store = Store(out / JOBS)
    planned = load(name).plan(scale, store)
    jobs = [job for job in planned if job not in store]
    for job in jobs:
        job.resolve()
        print(f"{job.label or job.key}   # about {clock(job.seconds)}")
    seconds = clock(sum(job.seconds for job in jobs))
    print(f"{name}: {len(planned) - len(jobs)} jobs finished, {len(jobs)} to do, about {seconds} of one core;", end=" ")
    print("others may follow from what these find")


def show(result: dict[str, Any]) -> None:
    """The verdict and the tables of a result, on screen."""
    for each in result["tables"]:
        print(f"\n  {each['title']}")
        for line in columns([each["columns"], *each["rows"]]):
            print(f"    {line}")
        if each["note"]:
            print(f"    {each['note']}")
    print(f"\n  paper: {result['paper']}\n  here:  {result['ours']}")
    print(f"  {result['verdict'].upper()}: {result['because']}")
    print(f"  {result['seeds']} seeds, {clock(result['seconds'])} of one core")


def columns(rows: list[list[Any]]) -> list[str]:
    """Rows as lines, every column as wide as its widest cell."""
    cells = [["" if cell is None else _text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _text(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
