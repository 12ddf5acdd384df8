"""Results: the folder that holds them, their tables and their heat maps.

results.json                    the checkpoint; of every cell: mean, standard error, all metrics, settings, versions,
                                and the number, bytes and sha256 of its samples; means over cells, see `means`
samples/CELL.jsonl              one record for every sample of a finished cell
samples/CELL.jsonl.PROCESS      the records that one process has written of an unfinished cell, each with a hash
FAMILY.png                      a heat map of a family whose cells, or their means, have two labels
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lucid_attention.files import UnreadableFile, parse_json, read_json, write_record, write_whole

from ..report.figures import write_png
from ..tables import text_table
from .cells import Cell, EvalError, Record

RESULTS, SAMPLES = "results.json", "samples"
PACKAGES = ("lucid-attention", "transformers", "torch", "lm_eval")

Summary = dict[str, Any]
"""A finished cell, as results.json holds it: its name, settings, mean, standard error, versions, and its samples'
number, bytes and sha256."""


class DamagedSamples(EvalError):
    """A file of samples that is not the one that results.json describes."""


class ResultsFolder:
    """The folder with the results of one checkpoint.

    checkpoint: its description, for writing. A folder that holds results of another checkpoint is refused.
    """

    def __init__(self, path: Path, checkpoint: dict[str, Any] | None = None) -> None:
        self.path, self.checkpoint = path, checkpoint or {}
        recorded = self.results().get("checkpoint", {}).get("sha256")
        if checkpoint and recorded not in (None, checkpoint["sha256"]):
            raise EvalError(f"{self.path} holds results of another checkpoint: choose another --out")

    def results(self) -> dict[str, Any]:
        """The content of results.json; {} without the file."""
        file = self.path / RESULTS
        if not file.exists():
            return {}
        try:
            return checked_evaluation(read_json(file), str(file))
        except ValueError as error:
            raise EvalError(f"{error}. Without this file the same command asks all samples again") from error

    def summary(self, name: str) -> Summary | None:
        """The cell of this name in results.json; None if it has none."""
        return next((cell for cell in self.results().get("cells", []) if cell["name"] == name), None)

    def file(self, name: str) -> Path:
        """The file with the records of a finished cell."""
        return self.path / SAMPLES / f"{name}.jsonl"

    def unfinished_files(self, name: str) -> list[Path]:
        """The files of an unfinished cell, one for each process that wrote records."""
        return sorted(self.file(name).parent.glob(f"{name}.jsonl.[0-9]*"))

    def finished(self, name: str) -> list[Record] | None:
        """The records of a finished cell; None for an unfinished one. DamagedSamples for a file that has changed."""
        file, summary = self.file(name), self.summary(name)
        # A file that results.json does not know may be of any origin.
        if summary is None or not file.exists():
            return None
        content = file.read_bytes()
        kept, got = ({key: from_.get(key) for key in _identity(b"")} for from_ in (summary, _identity(content)))
        if got != kept:
            raise DamagedSamples(
                f"{file} is not the file that {RESULTS} describes: expected {_format_identity(kept)}, got "
                f"{_format_identity(got)}"
            )
        return read_records(file)

    def unfinished(self, name: str, samples: int) -> dict[int, Record]:
        """The records of an unfinished cell, by their ids, without damaged ones and those of other checkpoints."""
        files = self.unfinished_files(name)
        records = {record["id"]: record for file in files for record in read_sealed(file, self.owner(name))}
        return {index: record for index, record in records.items() if index < samples}

    def owner(self, name: str) -> str:
        """What the hash of an unfinished record covers beside the record: a cell has samples of one release."""
        return f"{self.checkpoint['sha256']} {name} {json.dumps(versions())}"

    def finish(self, name: str, settings: dict[str, Any], cell: Cell, samples: int) -> None:
        """Merge the files of all processes into the file of a finished cell, and put the cell into results.json.

        A kill in between loses nothing: the files of the processes go last.
        """
        by_id = self.unfinished(name, samples)
        missing = samples - len(by_id)
        assert not missing, f"{missing} samples of {name} were not written"
        records = [by_id[index] for index in range(samples)]
        content = _lines(records).encode()
        write_whole(self.file(name), content)
        summary = summarize(name, settings, cell, records)
        self.put(summary | _identity(content))
        for file in self.unfinished_files(name):
            file.unlink()

    def put(self, summary: Summary) -> None:
        """Put a cell into results.json; it replaces a cell of the same name."""
        cells = self.results().get("cells", [])
        if summary not in cells:
            self._write([*(cell for cell in cells if cell["name"] != summary["name"]), summary])

    def put_means(self, means: Sequence[Summary]) -> None:
        """Put means over cells into results.json; they replace means over the same cells."""
        kept = [
            mean for mean in self.results().get("means", []) if mean["cells"] not in [new["cells"] for new in means]
        ]
        if [*kept, *means] != self.results().get("means", []):
            self._write(self.results().get("cells", []), [*kept, *means])

    def arrange(self, names: Sequence[str]) -> None:
        """Put the cells of these names last, in this order: one whose samples were asked again had become the last."""
        cells = self.results().get("cells", [])
        last = sorted((cell for cell in cells if cell["name"] in names), key=lambda cell: names.index(cell["name"]))
        arranged = [*(cell for cell in cells if cell["name"] not in names), *last]
        if arranged != cells:
            self._write(arranged)

    def forget(self, name: str) -> None:
        """Take a cell out of results.json: its samples will be asked again."""
        self._write([cell for cell in self.results().get("cells", []) if cell["name"] != name])

    def _write(self, cells: list[Summary], means: Sequence[Summary] | None = None) -> None:
        names = {cell["name"] for cell in cells}
        means = self.results().get("means", []) if means is None else means
        content: dict[str, Any] = {"checkpoint": self.checkpoint, "cells": cells}
        # A mean over a cell that is gone goes with it.
        if kept := [mean for mean in means if names.issuperset(mean["cells"])]:
            content["means"] = kept
        write_record(self.path / RESULTS, content)


def _identity(content: bytes) -> dict[str, Any]:
    """What results.json keeps of a file of samples."""
    return {
        "samples": content.count(b"\n"),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _format_identity(identity: dict[str, Any]) -> str:
    return f"{identity['samples']} samples in {identity['bytes']} bytes (sha256 {str(identity['sha256'])[:12]})"


def read_records(file: Path) -> list[Record]:
    """The records of a finished cell."""
    lines = file.read_bytes().splitlines()
    return [parse_json(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)]


def _lines(records: Iterable[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _sealed(record: Record, owner: str) -> Record:
    """A record with a hash of itself and its owner."""
    return {"sha256": hashlib.sha256(f"{owner}\n{json.dumps(record)}".encode()).hexdigest(), "record": record}


def read_sealed(file: Path, owner: str) -> list[Record]:
    """The records of a file whose hashes are right. Others are left out: they will be asked again."""
    records = []
    for line in file.read_bytes().splitlines():
        try:
            content = parse_json(line, str(file))
        except UnreadableFile:
            continue
        record = content.get("record")
        if content == _sealed(record, owner):
            records.append(record)
    return records


class RecordWriter:
    """Appends records with hashes to a file and flushes each one. owner: see `ResultsFolder.owner`.

    Damaged lines are removed first: a line after a torn one would be part of it.
    """

    def __init__(self, file: Path, owner: str) -> None:
        self._owner = owner
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            write_whole(file, _lines(_sealed(record, owner) for record in read_sealed(file, owner)))
        self._file = file.open("a")

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(_lines([_sealed(record, self._owner)]))
        self._file.flush()


@cache
def versions() -> dict[str, str]:
    """The packages that a score depends on."""
    return {package: version(package) for package in PACKAGES}


def summarize(name: str, settings: dict[str, Any], cell: Cell, records: Sequence[Record]) -> Summary:
    """The mean score of a cell and its standard error, with the settings and versions that gave it.

    metrics: mean and standard error of every metric of the task, its score included. haystack_repeats: the most of a
    sample, where a haystack was too short.
    """
    names = dict.fromkeys(name for record in records for name in record.get("metrics", {}))
    summary = {
        "name": name,
        **settings,
        "out_of": cell.out_of,
        "samples": len(records),
        **_mean([record["score"] for record in records]),
        "metrics": {name: _mean([record["metrics"][name] for record in records]) for name in names},
        "versions": versions(),
    }
    repeats = max(record.get("haystack_repeats", 0) for record in records)
    return summary | ({"haystack_repeats": repeats} if repeats else {})


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (len(values) - 1) / len(values)) if len(values) > 1 else None
    return {"mean": mean, "standard_error": error}


def by_metric(summaries: Sequence[Summary]) -> list[Summary]:
    """The summaries, and one for every further metric of a cell."""
    return [
        summary | {"metric": metric, **summary["metrics"].get(metric, {})}
        for summary in summaries
        for metric in dict.fromkeys([summary["metric"], *summary["metrics"]])
    ]


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


def results_table(summaries: Sequence[Summary], means: Sequence[Summary] = ()) -> str:
    """Scores and standard errors: one table for each family and metric, a grid if the cells have two labels.

    means: over these cells; each kind of mean is a table, too.
    """
    tables = []
    summaries = by_metric(summaries)
    for family, metric in dict.fromkeys((summary["family"], format_metric(summary)) for summary in summaries):
        cells = [cell for cell in summaries if (cell["family"], format_metric(cell)) == (family, metric)]
        samples = "/".join(map(str, sorted({cell["samples"] for cell in cells})))
        rows = _grid(cells) if len(cells[0]["labels"]) == 2 else _list(cells)
        tables.append(f"{family}: {metric} ± standard error, {samples} samples a cell\n{text_table(rows)}")
    for family, over in dict.fromkeys((mean["family"], _format_over(mean)) for mean in means):
        members = [mean for mean in means if (mean["family"], _format_over(mean)) == (family, over)]
        rows = _grid(members) if len(members[0]["labels"]) == 2 else _list(members)
        tables.append(f"{family}, mean over {over}: {format_metric(members[0])} ± standard error\n{text_table(rows)}")
    return "\n\n".join(tables)


def _format_over(mean: Summary) -> str:
    return "; ".join(f"{label} {', '.join(map(str, values))}" for label, values in mean["over"].items())


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


def draw_results(summaries: Sequence[Summary], means: Sequence[Summary], out: Path, name: str) -> list[Path]:
    """Draw a heat map for each family whose cells, or whose means over tasks, have two labels and a best score.

    name: of the checkpoint.
    """
    files = []
    for family in dict.fromkeys(summary["family"] for summary in summaries):
        cells = [summary for summary in summaries if summary["family"] == family and summary["out_of"]]
        if cells and len(cells[0]["labels"]) > 2:
            cells = [mean for mean in means if mean["family"] == family and list(mean["over"]) == ["task"]]
        axes = list(cells[0]["labels"]) if cells else []
        if len(axes) == 2:
            by_labels = {tuple(cell["labels"].values()): 100 * cell["mean"] / cell["out_of"] for cell in cells}
            rows, columns = (list(dict.fromkeys(labels[axis] for labels in by_labels)) for axis in (0, 1))
            values = [[by_labels.get((row, column)) for column in columns] for row in rows]
            panel = {"name": "", "rows": rows, "columns": columns, "values": values}
            title = f"{family}: {name}\n{cells[0]['metric']}, %"
            labels = {"rows": {"label": axes[0]}, "columns": {"label": axes[1]}, "range": [0, 100]}
            figure = {"kind": "heatmaps", "title": title, "panels": [panel]} | labels
            files.append(write_png(figure, out / f"{family}.png"))
    return files


def checked_evaluation(content: Any, where: str) -> dict[str, Any]:
    """The content of a results.json of `lucid eval`, checked: {"checkpoint", "cells"}, and "means" if it has some."""
    checkpoint = _expect(content, "checkpoint", dict, where)
    _expect(checkpoint, "name", str, f"{where}: checkpoint")
    _check_attention(checkpoint.get("attention") or "softmax", f"{where}: checkpoint")
    for number, cell in enumerate(_expect(content, "cells", list, where)):
        _check_cell(cell, f"{where}: cells[{number}]")
    for number, mean in enumerate(_expect(content, "means", list, where) if "means" in content else []):
        _expect(mean, "over", dict, f"{where}: means[{number}]")
        _expect(mean, "cells", list, f"{where}: means[{number}]")
        _check_cell({"name": "", **mean}, f"{where}: means[{number}]")
    return dict(content)


def _check_attention(attention: Any, where: str) -> None:
    """Refuse what is neither the name of an attention nor a list of names, one for every layer."""
    names = attention if isinstance(attention, list) else [attention]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: attention must be a name or a list of names, got {attention!r:.80}")


def _check_cell(cell: Any, where: str) -> None:
    for key in ("name", "family", "metric"):
        _expect(cell, key, str, where)
    for label, value in _expect(cell, "labels", dict, where).items():
        if not isinstance(value, str | int | float):
            raise ValueError(f"{where}: the label {label!r} must be a text or a number, got {value!r:.80}")
    if _expect(cell, "samples", int, where) < 1:
        raise ValueError(f"{where}: samples must be at least 1, got {cell['samples']}")
    _expect(cell, "mean", (int, float), where)
    for key, expected in {
        "standard_error": (int, float),
        "out_of": (int, float),
        "versions": dict,
        "sha256": str,
    }.items():
        if cell.get(key) is not None:
            _expect(cell, key, expected, where)
    if cell.get("out_of") and not math.isnan(cell["mean"]) and not 0 <= cell["mean"] <= cell["out_of"]:
        raise ValueError(f"{where}: mean must be 0 to out_of, {cell['out_of']}, got {cell['mean']}")


def _expect(holder: Any, key: str, expected: Any, where: str) -> Any:
    """The value of `key`, which must be of a type, or of one of a tuple of types."""
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        types = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"{where}: {key} must be of type {names}, got {value!r:.80}")
    return value
