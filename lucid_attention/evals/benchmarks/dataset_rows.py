"""Rows of data sets, from the hub or from local files of the same format. An error is one sentence."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...base.files import parse_json, read_text
from ...base.messages import first_line
from ..cells import EvalError

Row = dict[str, Any]
LOGGERS = ("huggingface_hub", "huggingface_hub.utils._http", "datasets")


def hub_split(name: str, config: str, split: str, alternative: str) -> list[Row]:
    """A split of a data set on the hub. alternative: for the error message, a sentence on a way without the hub."""
    from datasets import load_dataset

    with _errors_explained(f"data set {name!r} (config {config!r}, split {split!r})", alternative):
        return list(load_dataset(name, config, split=split))


def zipped_lines(url: str, file: str, alternative: str) -> list[Row]:
    """A .jsonl file in a .zip on the hub."""
    from datasets import load_dataset

    with _errors_explained(f"{file} in {url}", alternative):
        return list(load_dataset("json", data_files={"rows": f"zip://{file}::{url}"}, split="rows"))


@contextmanager
def _errors_explained(what: str, alternative: str) -> Iterator[None]:
    """Turn any error into one sentence. The libraries below `load_dataset` have no common class of exceptions."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise EvalError(f"{what} cannot be read: {first_line(error)}. {alternative}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def local_lines(path: Path, fields: tuple[tuple[str, ...], ...]) -> list[Row]:
    """The rows of a .jsonl file. fields: every row must have one name of each tuple."""
    if not path.is_file():
        raise EvalError(f"--data-dir: there is no file {str(path)!r}")
    rows = []
    # Not splitlines: a text may hold other line ends than "\n", which JSON does not escape.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}", object)
        for names in fields:
            if not isinstance(row, dict) or not any(name in row for name in names):
                raise EvalError(f"{path}, line {number}: expected a field {' or '.join(map(repr, names))}, got none")
        rows.append(row)
    if not rows:
        raise EvalError(f"{path}: holds no rows")
    return rows
