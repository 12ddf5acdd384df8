"""`lucid compare`: scores of several checkpoints on the same samples, and confidence intervals of the differences."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..tables import text_table
from .cells import EvalError
from .command import flags, given_options, prepare_checkpoint, print_or_explain
from .means import means
from .results import RESULTS, ResultsFolder, Summary, format_labels, format_metric, format_score
from .runner import Evaluation

# The bootstrap: how many times the samples are drawn, and the share of the differences inside the interval.
DRAWS, SHARE = 10_000, 0.95
# Indices drawn at a time, which bounds the memory.
INDICES = 1_000_000


class Interval(NamedTuple):
    """A difference of means and the limits of its 95 % confidence interval."""

    difference: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low > 0 or self.high < 0


def paired_difference(a: Sequence[float], b: Sequence[float], draws: int = DRAWS) -> Interval:
    """The mean of b − a over the samples, with the percentile interval of the paired bootstrap.

    A draw takes samples with replacement, each with both of its scores. The draws are the same in every call.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"a and b must be scores of the same samples, got {len(a)} and {len(b)}")
    gaps = np.asarray(b, float) - np.asarray(a, float)
    random = np.random.default_rng(0)
    size = max(1, INDICES // len(gaps))
    parts = [min(size, draws - first) for first in range(0, draws, size)]
    means = np.concatenate([gaps[random.integers(len(gaps), size=(part, len(gaps)))].mean(1) for part in parts])
    if len(gaps) == 1:
        # One sample says nothing about how samples scatter.
        return Interval(float(gaps[0]), -math.inf, math.inf)
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Interval(float(gaps.mean()), float(low), float(high))


class Compared(NamedTuple):
    """The results of one checkpoint. label: its name in the table. cells: by their names."""

    label: str
    folder: ResultsFolder
    cells: dict[str, Summary]

    def scores(self, name: str) -> list[float]:
        """The scores of a cell's samples, in their order."""
        records = self.folder.finished(name)
        if records is None:
            raise EvalError(f"{self.folder.file(name)} is missing: a comparison reads the scores of samples from it")
        return [record["score"] for record in records]


def comparison(compared: Sequence[Compared]) -> str:
    """A table of the cells that all checkpoints have: scores of the first checkpoint, differences of the others."""
    first, *others = compared
    shared = [name for name in first.cells if all(name in other.cells for other in others)]
    if not shared:
        raise EvalError(
            "the results have no cell in common: another tokenizer, dtype, seed, number of samples or option makes "
            "other cells"
        )
    rows = [["task", "metric", "samples", first.label, *(f"{other.label} − {first.label}" for other in others)]]
    cells = [first.cells[name] for name in shared]
    for title, names, cell in [
        *((format_labels(cell), [cell["name"]], cell) for cell in cells),
        *(
            (f"{format_labels(mean)}, mean over {', '.join(mean['over'])}", mean["cells"], mean)
            for mean in means(cells)
        ),
    ]:
        a, *scores = ([score for name in names for score in results.scores(name)] for results in compared)
        gaps = [paired_difference(a, b) for b in scores]
        rows.append(
            [
                title, format_metric(cell), str(cell["samples"]), format_score(cell, cell["mean"]),
                *(_format_interval(cell, gap) for gap in gaps),
            ]
        )  # fmt: skip
    note = f"[95 % interval] of the paired bootstrap over samples, {DRAWS} draws; * where it does not contain 0"
    left_out = sum(len(results.cells) for results in compared) - len(shared) * len(compared)
    left_out_note = f"\nleft out: {left_out} cells that some checkpoints lack" if left_out else ""
    return f"{text_table(rows)}\n\n{note}{left_out_note}"


def _format_interval(cell: Summary, gap: Interval) -> str:
    difference, low, high = (_signed(cell, value) for value in gap)
    return f"{difference} [{low}, {high}]" + (" *" if gap.is_clear else "")


def _signed(cell: Summary, value: float) -> str:
    text = format_score(cell, value if math.isfinite(value) else None)
    return text if text.startswith(("-", "?")) else f"+{text}"


def _open(folder: str, args: argparse.Namespace) -> ResultsFolder | Evaluation:
    """The results in a folder, or the evaluation of the checkpoint in it, checked."""
    if (Path(folder) / RESULTS).is_file():
        return ResultsFolder(Path(folder))
    if not args.tasks:
        raise EvalError(f"{folder!r} holds no {RESULTS}: to evaluate checkpoints, give --tasks")
    return prepare_checkpoint(folder, args, parent=args.out)


def _evaluated(opened: ResultsFolder | Evaluation) -> ResultsFolder:
    if isinstance(opened, ResultsFolder):
        return opened
    opened.run()
    return ResultsFolder(opened.out)


def run(args: argparse.Namespace) -> int:
    """`lucid compare`."""
    return print_or_explain("compare", lambda: _compared(args))


def _compared(args: argparse.Namespace) -> str:
    if len(args.folders) < 2:
        raise EvalError(f"expected two folders or more to compare, got {len(args.folders)}")
    # All folders are checked before the first one is evaluated.
    checked = [_open(folder, args) for folder in args.folders]
    if not any(isinstance(folder, Evaluation) for folder in checked):
        more = [name for name in ("tokenizer", "limit") if getattr(args, name) is not None]
        if given := [*given_options(args), *more]:
            raise EvalError(
                f"{flags(given)} is for checkpoints, and these folders hold results: expected --tasks at most"
            )
    opened = [_evaluated(folder) for folder in checked]
    names = [folder.results()["checkpoint"]["name"] for folder in opened]
    unique = len(set(names)) == len(names)
    labels = names if unique else [f"{name} ({number})" for number, name in enumerate(names, 1)]
    # The folder of a checkpoint may hold cells of earlier commands with other options.
    planned = {cell.name for folder in checked if isinstance(folder, Evaluation) for cell in folder.planned}
    chosen = [_chosen_cells(folder, args.tasks, planned) for folder in opened]
    return comparison([Compared(*parts) for parts in zip(labels, opened, chosen, strict=True)])


def _chosen_cells(folder: ResultsFolder, tasks: Sequence[str], planned: set[str]) -> dict[str, Summary]:
    """The planned cells; without a plan, those of the tasks, or all cells."""
    cells = {cell["name"]: cell for cell in folder.results()["cells"]}
    if planned:
        return {name: cell for name, cell in cells.items() if name in planned}
    return {name: cell for name, cell in cells.items() if not tasks or cell["family"] in tasks}
