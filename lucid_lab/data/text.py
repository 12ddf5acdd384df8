"""Documents of text: files, folders, addresses, lists of them, data sets of the hub, the Python library.

Everything is streamed by `datasets`: a bounded part of a large corpus is read without storing the rest.
"""

import glob
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lucid_attention.files import read_text
from lucid_attention.messages import first_line

from . import DataError

LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# Documentation of Python as Debian and others install it.
PYTHON_DOCS = "/usr/share/doc/python3*/html/_sources/**/*.txt"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# The files of the part of Dolma that the authors take, as its makers list them.
DOLMA = "@https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_6-sample.txt"
ALTERNATIVE = "Without the network, give a local file, folder or glob of .txt, .jsonl(.gz, .zst) or .parquet, or stdlib"


def documents(source: str, **options: Any) -> Iterator[str]:
    """The documents of a source that `lucid tokenize` accepts, in order. Options: see `open_text`."""
    yield from (row["text"] for row in explained(source, open_text(source, **options)))


def open_text(
    source: str,
    *,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    seed: int | None = None,
    skip_bad: bool = False,
) -> Any:
    """The documents of a source, streamed: a `datasets.IterableDataset` of {"text"}, None for a bad line with skip_bad.

    source: a file, a folder (all files that are not hidden), a glob, "stdlib" (source of the Python library), an
        address (https://...), "@LIST" (path or address of a list of files, one a line), or "hf:NAME".
        A file is one document of text, unless it ends in .jsonl, .ndjson, .json (a document per line) or .parquet.
        Text and lines may be compressed (.gz, .zst, .xz, .bz2).
    field: key or column of the text. split, config: of a data set of the hub.
    seed: shuffles the files; None for their own order.
    """
    with explained_errors(source):
        return _open(source, field, split, config, seed, skip_bad)


def _open(source: str, field: str, split: str, config: str | None, seed: int | None, skip_bad: bool) -> Any:
    from datasets import concatenate_datasets, load_dataset

    if source.startswith("hf:"):
        rows = load_dataset(source.removeprefix("hf:"), config, split=split, streaming=True)
        # A buffer would be lost when a stopped run resumes: only the order of the files is random.
        rows = rows if seed is None else rows.shuffle(seed=seed, buffer_size=1)
        return rows.map(partial(_column, field=field), remove_columns=rows.column_names)
    if config is not None:
        raise DataError(f"--config is for a data set of the hub (hf:NAME), got {config!r} for SOURCE {source!r}")
    files = find_files(source)
    if seed is not None:
        random.Random(seed).shuffle(files)
    parts = []
    for kind in dict.fromkeys(map(_kind, files)):
        # `datasets` takes a name for a pattern.
        names = [name if _is_address(name) else glob.escape(name) for name in files if _kind(name) == kind]
        if kind == "parquet":
            part = load_dataset("parquet", data_files=names, split="train", streaming=True, columns=[field])
            parts.append(part.map(partial(_column, field=field), remove_columns=[field]))
            continue
        part = load_dataset("text", data_files=names, split="train", streaming=True, sample_by=kind)
        # JSON lines are parsed here: `datasets` infers types of all keys, and refuses files whose metadata differ.
        parts.append(part.map(partial(_parsed, field=field, skip_bad=skip_bad)) if kind == "line" else part)
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def _column(row: dict[str, Any], field: str) -> dict[str, str]:
    if not isinstance(row.get(field), str):
        raise DataError(
            f"a row must have text in the column {field!r}, got {str(row)[:80]}: choose a column with --field"
        )
    return {"text": row[field]}


def _parsed(row: dict[str, str], field: str, skip_bad: bool) -> dict[str, str | None]:
    """The text of a line of JSON; "" for an empty line."""
    try:
        text = json.loads(row["text"])[field] if row["text"].strip() else ""
    except (ValueError, TypeError, KeyError, RecursionError):
        text = None
    if not isinstance(text, str) and not skip_bad:
        raise DataError(
            f"a line must be a JSON object with text for the key {field!r}, got {row['text'][:80]!r}. Choose a key "
            "with --field, or leave such lines out with --skip-bad"
        )
    return {"text": text if isinstance(text, str) else None}


@contextmanager
def explained_errors(source: str) -> Iterator[None]:
    """Turn an error of `datasets` into a sentence. It passes on those of many libraries, without a common class."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = first_line(error.__cause__ or error).rstrip(".")
        way_out = f". {ALTERNATIVE}" if source.startswith(("hf:", "@", "http")) else ""
        if "dataset scripts" in str(error).lower():
            way_out = f". Give a list of its files, such as {DOLMA} for Dolma"
        raise DataError(f"SOURCE {source!r} cannot be read: {reason}{way_out}") from error


def explained(source: str, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows, with errors of reading explained. Errors of the consumer are not touched."""
    with explained_errors(source):
        yield from rows


def find_files(source: str) -> list[str]:
    """The files and addresses of a source, sorted; those of a list in its order."""
    if source == "stdlib":
        return [*map(str, library_files()), *sorted(glob.glob(PYTHON_DOCS, recursive=True))]
    if source.startswith("@"):
        return _listed(source.removeprefix("@"))
    if _is_address(source):
        return [source]
    path = Path(source)
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        inside = sorted((file.relative_to(path) for file in path.rglob("*") if file.is_file()), key=Path.as_posix)
        files = [str(path / file) for file in inside if not any(part.startswith(".") for part in file.parts)]
        if not files:
            raise DataError(f"SOURCE {source!r} is a folder without files (hidden ones are left out)")
        return files
    files = sorted(file for file in glob.glob(source, recursive=True) if Path(file).is_file())
    if not files:
        raise DataError(
            f"SOURCE {source!r} does not exist: expected a file, a folder, a glob in quotes, stdlib, https://..., "
            "@LIST or hf:NAME"
        )
    return files


def library_files() -> list[Path]:
    """Source files of Python's library, without its tests: some of those have broken encodings on purpose."""
    root = Path(sysconfig.get_path("stdlib"))
    inside = sorted((file.relative_to(root) for file in root.rglob("*.py")), key=Path.as_posix)
    files = [root / file for file in inside if not SKIPPED_FOLDERS.intersection(file.parts)]
    if not files:
        raise DataError(f"SOURCE 'stdlib': no Python sources in {str(root)!r}, give a folder of text instead")
    return files


def _listed(name: str) -> list[str]:
    """The files of a list. Paths are relative to its folder. A list from the network may name addresses only."""
    if _is_address(name):
        import fsspec

        with fsspec.open(name, "rt", encoding="utf-8") as stream:
            lines = stream.read().splitlines()
    elif Path(name).is_file():
        lines = read_text(Path(name)).splitlines()
    else:
        raise DataError(f"SOURCE '@{name}' must be @LIST, a file of paths and addresses; there is no such file")
    files: list[str] = []
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        path = Path(name).parent / entry
        if _is_address(entry):
            files.append(entry)
        elif not _is_address(name) and path.is_file():
            files.append(str(path))
        else:
            expected = "an address (https://...)" if _is_address(name) else "a file, or an address (https://...)"
            raise DataError(f"{name}, line {number}: expected {expected}, got {entry!r}")
    if not files:
        raise DataError(f"{name}: the list holds no files")
    return files


def _is_address(name: str) -> bool:
    # "::" chains file systems in fsspec, and could name a local one.
    return name.startswith(("https://", "http://")) and "::" not in name


def _kind(name: str) -> str:
    """How a file is cut into documents: "document", "line" or "parquet"."""
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return "parquet" if name.endswith(".parquet") else "line" if name.endswith(LINES) else "document"
