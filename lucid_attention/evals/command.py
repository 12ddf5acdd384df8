"""`lucid eval`: the scores of a checkpoint."""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..base.processes import distributed_state
from ..models.checkpoint import DTYPES
from .checkpoint import Checkpoint
from .families import FAMILIES
from .runner import chosen, evaluate
from .runs import EvalError, Options, arguments, names
from .tables import results_table, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid eval`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="?", help="folder with config.json and weights")
    add_shared_arguments(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", help="of the results (default: results/NAME-HASH); the same command resumes there"
    )


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that `lucid compare` has too: which tasks, with which options, and how the model runs."""
    parser.add_argument("--tasks", metavar="NAMES", type=names, default=(), help="such as sniah,mniah; list shows all")
    for name, default, parse, text in arguments():
        shown = "" if default in ((), "") else f" (default: {_shown(default)})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, type=_reader(parse), metavar=name.upper(), help=text + shown
        )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="for a checkpoint that has none")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="samples at a time (default: 1)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first samples of every cell")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: as they are saved)")


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in dict.fromkeys(names))


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _reader(parse: Any) -> Any:
    """argparse names the reader in its message."""

    def read(text: str) -> Any:
        return parse(text)

    read.__name__ = {"counts": "list of numbers", "names": "list of names"}.get(parse.__name__, parse.__name__)
    return read


def options_of(args: argparse.Namespace) -> Options:
    """The options that were given, of those that the tasks take."""
    given = {each.name: getattr(args, each.name) for each in fields(Options) if each.metadata}
    given = {name: value for name, value in given.items() if value is not None}
    takes = [name for family in chosen(args.tasks).values() for name in family.takes]
    foreign = [name for name in given if name not in takes]
    if foreign:
        raise EvalError(f"{', '.join(args.tasks)} takes {_flags(takes)}, and not {_flags(foreign)}")
    return Options(**given)


def listing() -> str:
    """The families, a line each."""
    return table([["task", "what it measures"], *([name, family.about] for name, family in FAMILIES.items())])


def opened(folder: str, args: argparse.Namespace) -> Checkpoint:
    """The checkpoint in a folder, with the tokenizer that was given."""
    return Checkpoint(Path(folder), Path(args.tokenizer) if args.tokenizer else None)


def run(args: argparse.Namespace) -> int:
    """`lucid eval`. What stops it is said in one message; finished samples stay."""
    try:
        if args.tasks == ("list",) or args.checkpoint == "list":
            print(listing())
            return 0
        if args.checkpoint is None or not args.tasks:
            raise EvalError("expected a CHECKPOINT and --tasks NAMES; --tasks list shows all tasks")
        options = options_of(args)
        checkpoint = opened(args.checkpoint, args)
        out = Path(args.out) if args.out else Path("results") / f"{checkpoint.name}-{checkpoint.sha256[:8]}"
        cells = evaluate(
            checkpoint, args.tasks, options, out, batch_size=args.batch_size, limit=args.limit, dtype=args.dtype
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"lucid eval: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on with the samples that are left", file=sys.stderr)
        return 130
    if distributed_state().is_main_process:
        print(results_table(cells))
        print(f"\n{out / 'results.json'}, samples in {out / 'samples'}")
    return 0
