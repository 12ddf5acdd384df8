"""`lucid experiment`: test a claim of the paper."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.tables import text_table
from .jobs import Store
from .pool import JobsFailed, clock
from .scale import PAPER, SCALES, Scale
from .steps import check_steps
from .study import (
    EXPERIMENTS,
    JOBS,
    ExperimentError,
    judge_full_recipe,
    load,
    result_file,
    run_experiment,
    run_full_recipe,
)


def run(args: argparse.Namespace) -> int:
    """`lucid experiment`. Finished jobs stay when it is stopped."""
    try:
        if args.names == ["list"]:
            list_experiments()
            return 0
        names = list(EXPERIMENTS) if args.names == ["all"] else args.names
        for name in names:
            load(name)
        if args.judge:
            judge(names, args)
            return 0
        for name in names:
            code = _run_one(name, SCALES[args.scale], args)
            if code:
                return code
    except (ExperimentError, JobsFailed, ValueError) as error:
        print(f"lucid experiment: error: {error}", file=sys.stderr)
        return 1
    return 0


def judge(names: Sequence[str], args: argparse.Namespace) -> None:
    """Judge what the full recipes have written below this folder, and print the verdicts with the paper's numbers."""
    if SCALES[args.scale] is not PAPER:
        raise ValueError(f"--judge is for --scale {PAPER.name}: other scales are judged when they run")
    results = [judge_full_recipe(name, args.out) for name in names]
    for result in results:
        print(f"{result['name']}: {result['verdict'].upper()}: {result['because']}")
    print(verdict_table(results))


def verdict_table(results: Sequence[dict[str, Any]]) -> str:
    """A line for every result: its name, the paper's numbers, ours, and the verdict."""
    rows = [[result[key] for key in ("name", "paper", "ours", "verdict")] for result in results]
    return text_table([["claim", "paper", "ours", "verdict"], *rows], rule=True)


def _run_one(name: str, scale: Scale, args: argparse.Namespace) -> int:
    if scale is PAPER and (args.restart or args.processes):
        raise ValueError("--scale paper takes no --restart and no --processes: its commands have their own options")
    if args.dry_run:
        dry_run(name, scale, args.out)
        return 0
    if scale is PAPER:
        return run_full_recipe(name, args.out)
    print(f"{name} ({scale.name}): {load(name).CLAIM.title}", flush=True)
    result = run_experiment(name, scale, args.out, processes=args.processes, restart=args.restart)
    show(result)
    print(f"  {result_file(name, scale, args.out)}; `lucid report {args.out}` draws it")
    return 0


def list_experiments() -> None:
    """Print every claim with its section and its numbers in the paper."""
    for name in EXPERIMENTS:
        claim = load(name).CLAIM
        # Some experiments are not in the paper.
        section = f"§{claim.section}" if claim.section[0] in "A1234" else "new"
        print(f"{name:<18} {section:<5} {claim.title}")
        print(f"{'':<18} {'':<5} paper: {claim.paper}")


def dry_run(name: str, scale: Scale, out: Path) -> None:
    """Print the jobs or commands of an experiment. The commands of the full recipe are checked, as before a run."""
    if scale is PAPER:
        steps = load(name).paper()
        check_steps(steps)
        estimates = [step.gpu_hours() for step in steps]
        for step, hours in zip(steps, estimates, strict=True):
            print(step.line + ("" if hours is None else f"   # about {hours:,.0f} GPU hours"))
        print(f"{name}: {len(steps)} commands, about {sum(filter(None, estimates)):,.0f} hours of an H100 for training")
        return
    store = Store(out / JOBS)
    planned = load(name).plan(scale, store)
    jobs = [job for job in planned if job not in store]
    for job in jobs:
        job.resolve()
        print(f"{job.label or job.key}   # about {clock(job.seconds)}")
    seconds = clock(sum(job.seconds for job in jobs))
    print(f"{name}: {len(planned) - len(jobs)} jobs finished, {len(jobs)} to do, about {seconds} of one core;", end=" ")
    print("their results may add others")


def show(result: dict[str, Any]) -> None:
    """Print the tables and the verdict of a result."""
    for table in result["tables"]:
        print(f"\n  {table['title']}")
        print("\n".join(f"    {line}" for line in table_lines(table)))
        if table["note"]:
            print(f"    {table['note']}")
    print(f"\n  paper: {result['paper']}\n  here:  {result['ours']}")
    print(f"  {result['verdict'].upper()}: {result['because']}")
    print(f"  {result['seeds']} seeds, {clock(result['seconds'])} of one core")


def table_lines(table: dict[str, Any]) -> list[str]:
    """A table of a result as lines of text."""
    return text_table([[_text(cell) for cell in row] for row in (table["columns"], *table["rows"])], rule=True).split(
        "\n"
    )


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
