"""`lucid eval`: the scores of a checkpoint."""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..processes import distributed_state
from ..tables import text_table
from .cells import EvalError, Options
from .checkpoint import Checkpoint
from .families import FAMILIES, find_families
from .means import means
from .results import RESULTS, SAMPLES, results_table
from .runner import Evaluation, prepare


def flags(names: Iterable[str]) -> str:
    """Options as they are written on the command line."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in dict.fromkeys(names))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of tasks that the command line has."""
    options = {option.name: getattr(args, option.name) for option in fields(Options) if option.metadata}
    return {name: value for name, value in options.items() if value is not None}


def read_options(args: argparse.Namespace) -> Options:
    """The options on the command line. An option that no given task takes is an error."""
    options = given_options(args)
    known_options = [name for family in find_families(args.tasks).values() for name in family.takes]
    unused = [name for name in options if name not in known_options]
    if unused:
        raise EvalError(f"{', '.join(args.tasks)} takes {flags(known_options)}, and not {flags(unused)}")
    return Options(**options)


def prepare_checkpoint(
    folder: str, args: argparse.Namespace, *, out: str | None = None, parent: str = "results"
) -> Evaluation:
    """Check the evaluation of the checkpoint in `folder` that the arguments ask for.

    out: the folder of the results; None for the folder NAME-HASH in `parent`.
    """
    options = read_options(args)
    checkpoint = Checkpoint(Path(folder), Path(args.tokenizer) if args.tokenizer else None)
    results = Path(out) if out else Path(parent) / f"{checkpoint.name}-{checkpoint.sha256[:8]}"
    return prepare(
        checkpoint,
        args.tasks,
        options,
        results,
        batch_size=args.batch_size,
        limit=args.limit,
        dtype=args.dtype,
        ranges=args.mean_lengths,
    )


def listing() -> str:
    """The families, a line each."""
    return text_table([["task", "what it measures"], *([name, family.about] for name, family in FAMILIES.items())])


def print_or_explain(command: str, make_text: Callable[[], str]) -> int:
    """Print the text from `make_text` on the main process; an error becomes one line on stderr. Gives the exit code."""
    try:
        text = make_text()
    except ValueError as error:
        print(f"lucid {command}: error: {error}", file=sys.stderr)
        return 1
    if distributed_state().is_main_process:
        print(text)
    return 0


def run(args: argparse.Namespace) -> int:
    """`lucid eval`."""
    return print_or_explain("eval", lambda: _evaluated(args))


def _evaluated(args: argparse.Namespace) -> str:
    if args.tasks == ("list",) or args.checkpoint == "list":
        return listing()
    if args.checkpoint is None or not args.tasks:
        raise EvalError("expected a CHECKPOINT and --tasks NAMES; --tasks list shows all tasks")
    evaluation = prepare_checkpoint(args.checkpoint, args, out=args.out)
    summaries, out = evaluation.run(), evaluation.out
    table = results_table(summaries, means(summaries, evaluation.ranges))
    return f"{table}\n\n{out / RESULTS}, samples in {out / SAMPLES}"
