"""Rows of data sets, from the hub or from local files of the same format; what cannot be read is said in a sentence."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..runs import EvalError

Row = dict[str, Any]
CHATTER = ("huggingface_hub", "huggingface_hub.utils._http", "datasets")


def hub_split(name: str, config: str, split: str, alternative: str) -> list[Row]:
    """A split of a data set of the hub. alternative: what to do without the hub."""
    from datasets import load_dataset

    with _explained(f"data set {name!r} (config {config!r}, split {split!r})", alternative):
        return list(load_dataset(name, config, split=split))


def zipped_lines(url: str, file: str, alternative: str) -> list[Row]:
    """A .jsonl file in a .zip of the hub."""
    from datasets import load_dataset

    with _explained(f"{file} in {url}", alternative):
        return list(load_dataset("json", data_files={"rows": f"zip://{file}::{url}"}, split="rows"))


@contextmanager
def _explained(what: str, alternative: str) -> Iterator[None]:
    """One sentence instead of a trace through five libraries, whose exceptions have no common class."""
    loggers = [logging.getLogger(name) for name in CHATTER]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EvalError(f"{what} cannot be read: {reason}. {alternative}") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def local_lines(path: Path, fields: tuple[tuple[str, ...], ...]) -> list[Row]:
    """The rows of a .jsonl file. fields: what every row must have; of several names in a tuple, one."""
    if not path.is_file():
        raise EvalError(f"--data-dir: there is no file {str(path)!r}")
    rows = []
    # Not splitlines: a text may hold other ends of lines than "\n", which JSON does not escape.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise EvalError(f"{path}, line {number}: no JSON: {error}") from error
        for names in fields:
            if not isinstance(row, dict) or not any(name in row for name in names):
                raise EvalError(f"{path}, line {number}: expected a field {' or '.join(map(repr, names))}, got none")
        rows.append(row)
    if not rows:
        raise EvalError(f"{path}: holds no rows")
    return rows
