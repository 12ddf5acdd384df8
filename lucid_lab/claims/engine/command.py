"""`lucid experiment`: test a claim of the paper."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lucid_attention.memory import gigabytes

from ...tables import text_table
from ...training.estimate import Estimate
from .full_recipe import gpu_hours, judge_full_recipe, run_full_recipes, steps_of
from .jobs import Store
from .pool import JobsFailed, clock
from .scale import COMMANDS, HAVE_HOURS, HOURS, PAPER, REHEARSAL, SCALES, SMALL, Scale
from .steps import check_steps
from .study import EXPERIMENTS, JOBS, ExperimentError, lacks, load, result_file, run_experiment


def run(args: argparse.Namespace) -> int:
    """`lucid experiment`. Finished jobs stay when it is stopped."""
    try:
        if args.names == ["list"]:
            list_experiments()
            return 0
        scale = SCALES[args.scale]
        every = HAVE_HOURS if scale is HOURS else EXPERIMENTS
        names = list(every) if args.names == ["all"] else args.names
        for name in names:
            load(name)
        _check_options(scale, args)
        if args.model or args.texts:
            scale = replace(scale, model=args.model, texts=args.texts)
        if args.judge:
            judge(names, scale, args.out)
        elif args.dry_run:
            for name in names:
                dry_run(name, scale, args.out)
        elif scale in COMMANDS:
            return run_full_recipes(names, scale, args.out, restart=args.restart, then=show)
        else:
            for name in names:
                _run_one(name, scale, args)
    except (ExperimentError, JobsFailed, ValueError) as error:
        print(f"lucid experiment: error: {error}", file=sys.stderr)
        return 1
    return 0


def judge(names: Sequence[str], scale: Scale, out: Path) -> None:
    """Judge what the commands of full recipes have written, and print the verdicts with the paper's numbers."""
    if scale not in COMMANDS:
        raise ValueError(f"--judge is for --scale {PAPER.name} and {REHEARSAL.name}: others are judged when they run")
    results = [judge_full_recipe(name, scale, out) for name in names]
    for result in results:
        print(f"{result['name']}: {result['verdict'].upper()}: {result['because']}")
    print(verdict_table(results))


def verdict_table(results: Sequence[dict[str, Any]]) -> str:
    """A line for every result: its name, the paper's numbers, ours, and the verdict."""
    rows = [[result[key] for key in ("name", "paper", "ours", "verdict")] for result in results]
    return text_table([["claim", "paper", "ours", "verdict"], *rows], rule=True)


def _check_options(scale: Scale, args: argparse.Namespace) -> None:
    without = [name for name in args.names if name != "all" and name not in HAVE_HOURS] if scale is HOURS else []
    if without:
        raise ValueError(
            f"--scale hours is for {', '.join(HAVE_HOURS)}, got {', '.join(without)}: use --scale {SMALL.name}"
        )
    if scale is PAPER and (args.restart or args.processes):
        raise ValueError("--scale paper takes no --restart and no --processes: its commands have their own options")
    if scale in COMMANDS and (args.model or args.texts):
        raise ValueError(f"--scale {scale.name} takes no --model and no --texts: its commands name them")
    if scale is REHEARSAL and args.processes:
        raise ValueError("--scale rehearsal takes no --processes: it has two processes where the full recipe has eight")


def _run_one(name: str, scale: Scale, args: argparse.Namespace) -> None:
    print(f"{name} ({scale.name}): {load(name).CLAIM.title}", flush=True)
    reason = lacks(name, scale)
    if reason is not None and args.names == ["all"]:
        print(f"  skipped: {reason}")
        return
    result = run_experiment(name, scale, args.out, processes=args.processes, restart=args.restart)
    show(result)
    print(f"  {result_file(name, scale, args.out)}; `lucid report {args.out}` draws it")


def list_experiments() -> None:
    """Print every claim with its section and its numbers in the paper."""
    for name in EXPERIMENTS:
        claim = load(name).CLAIM
        # Some experiments are not in the paper.
        section = f"§{claim.section}" if claim.section[0] in "A1234" else "new"
        print(f"{name:<20} {section:<5} {claim.title}")
        print(f"{'':<20} {'':<5} paper: {claim.paper}")


def dry_run(name: str, scale: Scale, out: Path) -> None:
    """Print the jobs or commands of an experiment. The commands of the full recipe are checked, as before a run."""
    if scale in COMMANDS:
        _dry_run_steps(name, scale)
        return
    store = Store(out / JOBS)
    planned = load(name).plan(scale, store)
    jobs = [job for job in planned if job not in store]
    for job in jobs:
        job.resolve()
        print(f"{job.label or job.key}   # about {clock(job.seconds)}")
    seconds = clock(sum(job.seconds for job in jobs))
    print(f"{name}: {len(planned) - len(jobs)} jobs finished, {len(jobs)} to do, about {seconds} of one core;", end=" ")
    print(lacks(name, scale) or "their results may add others")


def _dry_run_steps(name: str, scale: Scale) -> None:
    steps = steps_of(name, scale)
    check_steps(steps)
    estimates = [step.estimate() if scale is PAPER else None for step in steps]
    for step, needs in zip(steps, estimates, strict=True):
        print(step.line + ("" if needs is None else f"   # {_needs(needs)}"))
    hours = f", about {gpu_hours(estimates):,.0f} hours of an H100 for training" if scale is PAPER else ""
    print(f"{name}: {len(steps)} commands{hours}")


def _needs(needs: Estimate) -> str:
    fits = "" if needs.fits else ", which DOES NOT FIT"
    return f"about {needs.gpu_hours:,.0f} GPU hours, {gigabytes(needs.memory_bytes)} of each {needs.device}{fits}"


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
