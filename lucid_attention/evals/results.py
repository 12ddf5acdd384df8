"""Results: the folder that holds them, their tables and their heat maps.

results.json                    the checkpoint; of every cell: mean, standard error, settings, versions
samples/CELL.jsonl              one record for every sample of a finished cell
samples/CELL.jsonl.PROCESS      the records that one process has written of an unfinished cell
FAMILY.png                      a heat map of a family whose cells have two labels
"""

import json
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..base.files import write_whole
from ..base.tables import text_table
from ..report.pictures import draw_heatmap
from .cells import Cell, EvalError, Record

RESULTS, SAMPLES = "results.json", "samples"
PACKAGES = ("lucid-attention", "transformers", "torch", "lm_eval")

Summary = dict[str, Any]
"""A finished cell, as results.json holds it: its name, settings, mean, standard error, versions."""


class ResultsFolder:
    """The folder with the results of one checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def results(self) -> dict[str, Any]:
        """The content of results.json; {} without the file."""
        file = self.path / RESULTS
        try:
            return json.loads(file.read_text()) if file.exists() else {}
        except json.JSONDecodeError as error:
            raise EvalError(f"{file} cannot be read: {error}") from error

    def check_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a folder that holds results of another checkpoint."""
        recorded = self.results().get("checkpoint", {}).get("sha256", checkpoint["sha256"])
        if recorded != checkpoint["sha256"]:
            raise EvalError(f"{self.path} holds results of another checkpoint: choose another --out")

    def file(self, name: str) -> Path:
        """The file with the records of a finished cell."""
        return self.path / SAMPLES / f"{name}.jsonl"

    def unfinished_files(self, name: str) -> list[Path]:
        """The files of an unfinished cell, one for each process that wrote records."""
        return sorted(self.file(name).parent.glob(f"{name}.jsonl.[0-9]*"))

    def finished(self, name: str) -> list[Record] | None:
        """The records of a finished cell; None for an unfinished one."""
        file = self.file(name)
        return read_records(file) if file.exists() else None

    def unfinished(self, name: str, samples: int) -> dict[int, Record]:
        """The records of an unfinished cell, by their ids."""
        records = {record["id"]: record for file in self.unfinished_files(name) for record in read_records(file)}
        return {index: record for index, record in records.items() if index < samples}

    def finish(self, name: str, samples: int) -> None:
        """Merge the files of all processes into the file of a finished cell."""
        records = self.unfinished(name, samples)
        missing = samples - len(records)
        assert not missing, f"{missing} samples of {name} were not written"
        write_whole(self.file(name), _lines(records[index] for index in range(samples)))
        for file in self.unfinished_files(name):
            file.unlink()

    def add(self, checkpoint: dict[str, Any], summary: Summary) -> None:
        """Put a cell into results.json; it replaces a cell of the same name."""
        cells = [cell for cell in self.results().get("cells", []) if cell["name"] != summary["name"]]
        content = {"checkpoint": checkpoint, "cells": [*cells, summary]}
        write_whole(self.path / RESULTS, json.dumps(content, indent=1) + "\n")


def read_records(file: Path) -> list[Record]:
    """The records of a file, up to the first line that was not written to its end."""
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


class RecordWriter:
    """Appends records to a file and flushes each one.

    A torn last line is removed first: no line after it could be read.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            write_whole(file, _lines(read_records(file)))
        self._file = file.open("a")

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(_lines([record]))
        self._file.flush()


def summarize(name: str, settings: dict[str, Any], cell: Cell, scores: Iterable[float]) -> Summary:
    """The mean score of a cell and its standard error, with the settings and versions that gave it."""
    values = list(scores)
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (len(values) - 1) / len(values)) if len(values) > 1 else None
    return {
        "name": name,
        **settings,
        "out_of": cell.out_of,
        "samples": len(values),
        "mean": mean,
        "standard_error": error,
        "versions": {package: version(package) for package in PACKAGES},
    }


def format_score(summary: Summary, value: float | None) -> str:
    """A score in per cent of the best one; a loss, which has no best value, with four digits."""
    if value is None:
        return "?"
    return f"{100 * value / summary['out_of']:.1f}" if summary["out_of"] else f"{value:.4f}"


def format_metric(summary: Summary) -> str:
    """The metric of a cell and its scale."""
    return f"{summary['metric']}, %" if summary["out_of"] else f"{summary['metric']} (less is better)"


def format_labels(summary: Summary) -> str:
    """The family and the labels of a cell: "mniah needles=4 length=2048"."""
    return " ".join([summary["family"], *(f"{name}={value}" for name, value in summary["labels"].items())])


def results_table(summaries: Sequence[Summary]) -> str:
    """Scores and standard errors: one table for each family and metric, a grid if the cells have two labels."""
    tables = []
    for family, metric in dict.fromkeys((summary["family"], format_metric(summary)) for summary in summaries):
        cells = [cell for cell in summaries if (cell["family"], format_metric(cell)) == (family, metric)]
        samples = "/".join(map(str, sorted({cell["samples"] for cell in cells})))
        rows = _grid(cells) if len(cells[0]["labels"]) == 2 else _list(cells)
        tables.append(f"{family}: {metric} ± standard error, {samples} samples a cell\n{text_table(rows)}")
    return "\n\n".join(tables)


def _with_error(summary: Summary) -> str:
    return f"{format_score(summary, summary['mean'])} ± {format_score(summary, summary['standard_error'])}"


def _list(cells: Sequence[Summary]) -> list[list[str]]:
    rows = [[*cells[0]["labels"], "score"]]
    return rows + [[*map(str, cell["labels"].values()), _with_error(cell)] for cell in cells]


def _grid(cells: Sequence[Summary]) -> list[list[str]]:
    """A row for each value of the first label, a column for each value of the second, and the mean of each column."""
    row_label, column_label = cells[0]["labels"]
    by_labels = {tuple(cell["labels"].values()): cell for cell in cells}
    row_values, column_values = (list(dict.fromkeys(values[axis] for values in by_labels)) for axis in (0, 1))
    rows = [[row_label, *(f"{column_label} {value}" for value in column_values)]]
    for row in row_values:
        in_row = [by_labels.get((row, column)) for column in column_values]
        rows.append([str(row), *(_with_error(cell) if cell else "" for cell in in_row)])
    if len(row_values) > 1:
        columns = [
            [cell["mean"] for values, cell in by_labels.items() if values[1] == value] for value in column_values
        ]
        rows.append(["mean", *(format_score(cells[0], sum(means) / len(means)) for means in columns)])
    return rows


def draw_results(summaries: Sequence[Summary], out: Path, name: str) -> list[Path]:
    """Draw a heat map for each family whose cells have two labels and a best score. name: of the checkpoint."""
    files = []
    for family in dict.fromkeys(summary["family"] for summary in summaries):
        cells = [summary for summary in summaries if summary["family"] == family and summary["out_of"]]
        axes = list(cells[0]["labels"]) if cells else []
        if len(axes) == 2:
            values = {tuple(cell["labels"].values()): 100 * cell["mean"] / cell["out_of"] for cell in cells}
            files.append(out / f"{family}.png")
            draw_heatmap(values, axes, files[-1], f"{family}: {name}\n{cells[0]['metric']}, %")
    return files
