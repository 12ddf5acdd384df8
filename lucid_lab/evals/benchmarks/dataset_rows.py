"""Rows of data sets, from the hub or from local files of the same format. An error is one sentence."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from itertools import islice
from pathlib import Path
from typing import Any

from lucid_attention.files import parse_json, read_text
from lucid_attention.messages import first_line

from ..cells import EvalError

Row = dict[str, Any]
# The fields of BABILong's rows.
PUBLISHED = (("input",), ("question",), ("target",))
LOGGERS = ("huggingface_hub", "huggingface_hub.utils._http", "datasets")


def hub_split(name: str, config: str, split: str, alternative: str, count: int | None = None) -> list[Row]:
    """The first `count` rows of a split of a data set on the hub; all for None.

    alternative: for the error message, a sentence on a way without the hub.
    """
    from datasets import load_dataset

    with _errors_explained(f"data set {name!r} (config {config!r}, split {split!r})", alternative):
        return list(islice(load_dataset(name, config, split=split), count))


def published_rows(name: str, task: str, length: int, count: int) -> list[Row]:
    """The first rows of a published set of BABILong. name: on the hub, or a folder with its files.

    On the hub the set has a config for each length and a split for each task.
    """
    file = _published_file(name, task, length)
    if file is not None:
        return local_lines(file, PUBLISHED)[:count]
    alternative = "Leave out --babilong-hub for stories of our own, or name a folder with data/TASK/LENGTH.json"
    return hub_split(name, f"{length // 1024}k", task, alternative, count)


def published_sha256(name: str, task: str, length: int) -> str:
    """The hash of a file of a published set, whose content may change; "" for the hub."""
    file = _published_file(name, task, length)
    if file is None:
        return ""
    if not file.is_file():
        raise EvalError(f"--babilong-hub: there is no file {str(file)!r}, expected in a folder of a published set")
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _published_file(name: str, task: str, length: int) -> Path | None:
    """The file of a task and a length in a folder, as `hf download --repo-type dataset` lays it; None for the hub."""
    return Path(name) / "data" / task / f"{length // 1024}k.json" if Path(name).is_dir() else None


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
    """The rows of a file with a JSON object on every line, or one list of objects. fields: every row must have one
    name of each tuple."""
    if not path.is_file():
        raise EvalError(f"--data-dir: there is no file {str(path)!r}")
    rows = []
    text = read_text(path)
    # Not splitlines: a text may hold other line ends than "\n", which JSON does not escape.
    lines = parse_json(text, str(path), list) if text.lstrip().startswith("[") else text.split("\n")
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}", object) if isinstance(line, str) else line
        for names in fields:
            if not isinstance(row, dict) or not any(name in row for name in names):
                raise EvalError(f"{path}, line {number}: expected a field {' or '.join(map(repr, names))}, got none")
        rows.append(row)
    if not rows:
        raise EvalError(f"{path}: holds no rows")
    return rows
