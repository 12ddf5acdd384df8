"""Results in a folder: samples of every cell as they are finished, and a summary of all cells.

results.json                    checkpoint, cells with mean, standard error, settings, versions
samples/CELL.jsonl              a record for every sample, when all are there
samples/CELL.jsonl.PROCESS      those of a cell that is not finished
FAMILY.png                      a heat map, where a family has two labels
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .runs import EvalError, Record, Run

RESULTS, SAMPLES = "results.json", "samples"
PACKAGES = ("lucid-attention", "transformers", "torch", "lm_eval")


def cell_settings(family: str, run: Run, limit: int | None, tokenizer_hash: str) -> dict[str, Any]:
    """All that the samples of a cell depend on. A tokenizer is known by its content: the same one may lie elsewhere."""
    metadata = {name: value for name, value in run.metadata.items() if name != "tokenizer"}
    return {
        "family": family,
        "task": run.task,
        "labels": run.labels,
        "metric": run.metric,
        "metadata": metadata,
        "answer_tokens": run.answer_tokens,
        "limit": limit,
        "tokenizer_sha256": tokenizer_hash,
    }


def cell_name(settings: dict[str, Any]) -> str:
    """A file name that people can read and that no other settings have."""
    labels = "-".join(f"{name}_{value}" for name, value in settings["labels"].items())
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{settings['family']}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', labels)}-{digest[:8]}"


class Folder:
    """The folder of results of one checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def results(self) -> dict[str, Any]:
        """The summary, {} if there is none."""
        file = self.path / RESULTS
        try:
            return json.loads(file.read_text()) if file.exists() else {}
        except json.JSONDecodeError as error:
            raise EvalError(f"{file} cannot be read: {error}") from error

    def check_is_of(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a folder with results of another checkpoint."""
        before = self.results().get("checkpoint", {}).get("sha256", checkpoint["sha256"])
        if before != checkpoint["sha256"]:
            raise EvalError(f"{self.path} holds results of another checkpoint: choose another --out")

    def file(self, cell: str) -> Path:
        """The samples of a finished cell."""
        return self.path / SAMPLES / f"{cell}.jsonl"

    def partial(self, cell: str) -> list[Path]:
        """The files of a cell that is not finished."""
        return sorted(self.file(cell).parent.glob(f"{cell}.jsonl.[0-9]*"))

    def finished(self, cell: str) -> list[Record] | None:
        """The records of a finished cell, None for another one."""
        file = self.file(cell)
        return read_records(file) if file.exists() else None

    def so_far(self, cell: str, samples: int) -> dict[int, Record]:
        """Records of an unfinished cell, by their ids."""
        found = {record["id"]: record for file in self.partial(cell) for record in read_records(file)}
        return {index: record for index, record in found.items() if index < samples}

    def finish(self, cell: str, samples: int) -> list[Record]:
        """Make one file of what the processes wrote."""
        found = self.so_far(cell, samples)
        missing = samples - len(found)
        assert not missing, f"{missing} samples of {cell} were not written"
        records = [found[index] for index in range(samples)]
        _write(self.file(cell), "".join(json.dumps(record) + "\n" for record in records))
        for file in self.partial(cell):
            file.unlink()
        return records

    def add(self, checkpoint: dict[str, Any], cell: dict[str, Any]) -> None:
        """Put a cell into the summary, in the place of an earlier one with its name."""
        results = self.results()
        cells = [each for each in results.get("cells", []) if each["name"] != cell["name"]]
        _write(self.path / RESULTS, json.dumps({"checkpoint": checkpoint, "cells": [*cells, cell]}, indent=1) + "\n")


def read_records(file: Path) -> list[Record]:
    """The records of a file; of a line that was not written to its end, none."""
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Writer:
    """Appends records, each on disk when the next one begins. Lines after a torn one could not be read: it is cut."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            whole = "".join(json.dumps(record) + "\n" for record in read_records(file))
            _write(file, whole)
        self._file = file.open("a")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def summary(name: str, settings: dict[str, Any], run: Run, scores: Iterable[float]) -> dict[str, Any]:
    """A cell of the summary: mean score and its standard error."""
    values = list(scores)
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
    return {
        "name": name,
        **settings,
        "out_of": run.out_of,
        "samples": len(values),
        "mean": mean,
        "standard_error": error,
        "versions": {package: version(package) for package in PACKAGES},
    }


def _write(file: Path, text: str) -> None:
    """All of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(file)
