"""`lucid compare`: checkpoints on the same samples, and how sure their differences are."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.processes import distributed_state
from .command import add_shared_arguments, opened, options_of
from .records import RESULTS, Folder
from .runner import evaluate
from .runs import EvalError
from .tables import scaled, table, unit

# Of the bootstrap: how often samples are drawn again, and what share of the differences the interval holds.
DRAWS, SHARE = 10_000, 0.95


class Interval(NamedTuple):
    """A difference of means, and between which values it lies with a confidence of 95 %."""

    difference: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside."""
        return self.low > 0 or self.high < 0


def paired_difference(a: Sequence[float], b: Sequence[float], draws: int = DRAWS) -> Interval:
    """Mean of b − a over samples, with the percentile interval of the paired bootstrap: samples are drawn again with
    replacement, each with both of its scores. The draws are the same every time."""
    if len(a) != len(b) or not a:
        raise ValueError(f"a and b must be scores of the same samples, got {len(a)} and {len(b)}")
    gaps = np.asarray(b, float) - np.asarray(a, float)
    random = np.random.default_rng(0)
    # In parts of a million: memory stays small.
    size = max(1, 1_000_000 // len(gaps))
    parts = [min(size, draws - first) for first in range(0, draws, size)]
    means = np.concatenate([gaps[random.integers(len(gaps), size=(part, len(gaps)))].mean(1) for part in parts])
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Interval(float(gaps.mean()), float(low), float(high))


class Results(NamedTuple):
    """The cells of one checkpoint, by name. label: what it is called in the table."""

    label: str
    folder: Folder
    cells: dict[str, dict[str, Any]]

    def scores(self, cell: str) -> list[float]:
        """Of the samples of a cell, in their order."""
        records = self.folder.finished(cell)
        if records is None:
            raise EvalError(f"{self.folder.file(cell)} is missing: the samples of a comparison are read from it")
        return [record["score"] for record in records]


def comparison(results: Sequence[Results]) -> str:
    """A table: the cells that all have, the first one's scores, and the differences of the others from it."""
    first = results[0]
    shared = [name for name in first.cells if all(name in each.cells for each in results)]
    if not shared:
        raise EvalError(
            "the results have no cell in common: another tokenizer, seed, number of samples or option makes others"
        )
    rows = [["task", "metric", "samples", first.label, *(f"{each.label} − {first.label}" for each in results[1:])]]
    for name in shared:
        cell = first.cells[name]
        labels = " ".join(f"{label}={value}" for label, value in cell["labels"].items())
        row = [f"{cell['family']} {labels}", unit(cell), str(cell["samples"]), scaled(cell, cell["mean"])]
        for other in results[1:]:
            gap = paired_difference(first.scores(name), other.scores(name))
            said = f"{_signed(cell, gap.difference)} [{_signed(cell, gap.low)}, {_signed(cell, gap.high)}]"
            row.append(said + (" *" if gap.is_clear else ""))
        rows.append(row)
    left_out = sum(len(each.cells) for each in results) - len(shared) * len(results)
    note = f"[95 % interval] of the paired bootstrap over samples, {DRAWS} draws; * where it does not hold 0"
    return table(rows) + f"\n\n{note}" + (f"\n{left_out} cells that not all have are left out" if left_out else "")


def _signed(cell: dict[str, Any], value: float) -> str:
    text = scaled(cell, value)
    return text if text.startswith("-") else f"+{text}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid compare`."""
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="checkpoints, or results of `lucid eval`; the first is compared to"
    )
    add_shared_arguments(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", default="results", help="of the results, a folder NAME-HASH each (default: results)"
    )


def _results(folder: str, args: argparse.Namespace) -> tuple[Folder, str]:
    if (Path(folder) / RESULTS).is_file():
        found = Folder(Path(folder))
        return found, found.results()["checkpoint"]["name"]
    if not args.tasks:
        raise EvalError(f"{folder!r} holds no {RESULTS}: to evaluate checkpoints, give --tasks")
    checkpoint, options = opened(folder, args), options_of(args)
    out = Path(args.out) / f"{checkpoint.name}-{checkpoint.sha256[:8]}"
    evaluate(checkpoint, args.tasks, options, out, batch_size=args.batch_size, limit=args.limit, dtype=args.dtype)
    return Folder(out), checkpoint.name


def _wanted(folder: Folder, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    cells = folder.results()["cells"]
    return {cell["name"]: cell for cell in cells if not args.tasks or cell["family"] in args.tasks}


def run(args: argparse.Namespace) -> int:
    """`lucid compare`."""
    try:
        if len(args.folders) < 2:
            raise EvalError("expected two folders or more to compare")
        found = [_results(folder, args) for folder in args.folders]
        labels = [label for _, label in found]
        unique = len(set(labels)) == len(labels)
        compared = [
            Results(label if unique else f"{label} ({number})", folder, _wanted(folder, args))
            for number, (folder, label) in enumerate(found, 1)
        ]
        text = comparison(compared)
    except (ValueError, FileNotFoundError) as error:
        print(f"lucid compare: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on with the samples that are left", file=sys.stderr)
        return 130
    if distributed_state().is_main_process:
        print(text)
    return 0
