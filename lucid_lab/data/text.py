"""Documents of text: files, folders, addresses, lists of them, data sets of the hub, the Python library.

Everything is streamed by `datasets`: a bounded part of a large corpus is read without storing the rest.
"""

import glob
import json
import random
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
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
# The files of Dolma, as its authors list them.
DOLMA = "@https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_7.txt"
ALTERNATIVE = "Without the network, give a local file, folder or glob of .txt, .jsonl(.gz, .zst) or .parquet, or stdlib"


def documents(source: str, *, field: str = "text", split: str = "train", config: str | None = None) -> Iterator[str]:
    """The documents of a source that `lucid tokenize` accepts, in order. Arguments: see `Text`."""
    return (text for text in Text(source, field=field, split=split, config=config) if text is not None)


class Text:
    """The documents of a source, streamed. Iterating yields texts, and None for a bad line with skip_bad.

    source: a file, a folder (all files that are not hidden), a glob, "stdlib" (source of the Python library), an
        address (https://...), "@LIST" (path or address of a list of files, one a line), or "hf:NAME[:CONFIG]".
        A file is one document of text, unless it ends in .jsonl, .ndjson, .json (a document per line) or .parquet.
        Text and lines may be compressed (.gz, .zst, .xz, .bz2).
    field: key or column of the text. split, config: of a data set of the hub.
    seed: shuffles the files; None for their own order.

    `state_dict` and `load_state_dict` save and restore the position, as those of `datasets.IterableDataset`.
    """

    def __init__(
        self,
        source: str,
        *,
        field: str = "text",
        split: str = "train",
        config: str | None = None,
        seed: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.source, self.field, self.skip_bad = source, field, skip_bad
        self.files: list[str] = []
        if source.startswith("hf:"):
            self._rows = self._open_hub(split, config, seed)
        elif config:
            raise DataError(f"--config is for a data set of the hub (hf:NAME), got {config!r} for SOURCE {source!r}")
        else:
            self.files = find_files(source)
            if seed is not None:
                random.Random(seed).shuffle(self.files)
            with self._explained_errors():
                self._rows = self._open_files()

    def __iter__(self) -> Iterator[str | None]:
        rows = iter(self._rows)
        while True:
            with self._explained_errors():
                row = next(rows, None)
            if row is None:
                return
            try:
                yield self._text(row)
            except DataError:
                if not self.skip_bad:
                    raise
                yield None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last text, in JSON types."""
        return dict(self._rows.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self._rows.load_state_dict(state)

    def _open_files(self) -> Any:
        from datasets import concatenate_datasets, load_dataset

        by_kind: dict[str, list[str]] = {}
        for file in self.files:
            by_kind.setdefault(_kind(file), []).append(file)
        parts = []
        for kind, files in by_kind.items():
            # `datasets` takes a name for a pattern.
            names = [name if _is_address(name) else glob.escape(name) for name in files]
            options: dict[str, Any] = {"columns": [self.field]} if kind == "parquet" else {"sample_by": kind}
            reader = "parquet" if kind == "parquet" else "text"
            part = load_dataset(reader, data_files=names, split="train", streaming=True, **options)
            # JSON lines are parsed here: `datasets` infers types of all keys, and refuses files whose metadata differ.
            old, new = self.field if kind == "parquet" else "text", "line" if kind == "line" else "text"
            parts.append(part if old == new else part.rename_column(old, new))
        return concatenate_datasets(parts) if len(parts) > 1 else parts[0]

    def _open_hub(self, split: str, config: str | None, seed: int | None) -> Any:
        from datasets import load_dataset

        name, _, named = self.source.removeprefix("hf:").partition(":")
        if not name or (config and named and config != named):
            raise DataError(f"SOURCE must be hf:NAME or hf:NAME:CONFIG, with one configuration, got {self.source!r}")
        with self._explained_errors():
            rows = load_dataset(name, config or named or None, split=split, streaming=True)
            columns = rows.column_names or [self.field]
        if self.field not in columns:
            raise DataError(f"{self.source} has no column {self.field!r}, got {', '.join(columns)}: choose one of them"
                            " with --field")  # fmt: skip
        rows = rows.select_columns([self.field])
        rows = rows if self.field == "text" else rows.rename_column(self.field, "text")
        # A buffer would be lost when a stopped run resumes: only the order of the files is random.
        return rows if seed is None else rows.shuffle(seed=seed, buffer_size=1)

    def _text(self, row: dict[str, Any]) -> str:
        if row.get("line") is None:
            text = row.get("text")
        elif not row["line"].strip():
            return ""
        else:
            try:
                value = json.loads(row["line"])
                text = value[self.field]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise DataError(
                    f"{self.source}: a line must be a JSON object with the key {self.field!r}, got "
                    f"{row['line'][:80]!r} ({type(error).__name__}). Choose a key with --field, or leave such "
                    "lines out with --skip-bad"
                ) from error
        if not isinstance(text, str):
            raise DataError(f"{self.source}: {self.field!r} must be text, got {text!r}")
        return text

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Turn an error of `datasets` into a sentence. It passes on those of many libraries, without a common class."""
        try:
            yield
        except UnicodeDecodeError as error:
            raise DataError(f"{self._undecodable()} must be UTF-8 text: {error}") from error
        except Exception as error:
            reason = first_line(error.__cause__ or error).rstrip(".")
            way_out = ""
            if "dataset scripts" in str(error).lower():
                way_out = f". Give a list of its files, such as {DOLMA} for Dolma"
            elif self.source.startswith("hf:") or any(map(_is_address, self.files)):
                way_out = f". {ALTERNATIVE}"
            raise DataError(f"SOURCE {self.source!r} cannot be read: {reason}{way_out}") from error

    def _undecodable(self) -> str:
        for file in self.files:
            if _kind(file) != "parquet" and not file.endswith(COMPRESSED) and not _is_address(file):
                try:
                    read_text(Path(file))
                except ValueError:
                    return file
        return self.source


def find_files(source: str) -> list[str]:
    """The files and addresses of a source, sorted; those of a list in its order."""
    if source == "stdlib":
        return _standard_library()
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


def _standard_library() -> list[str]:
    """Python's own source files, without its tests: some of those have broken encodings on purpose."""
    root = Path(sysconfig.get_path("stdlib"))
    inside = sorted((file.relative_to(root) for file in root.rglob("*.py")), key=Path.as_posix)
    files = [str(root / file) for file in inside if not SKIPPED_FOLDERS.intersection(file.parts)]
    if not files:
        raise DataError(f"SOURCE 'stdlib': no Python sources in {str(root)!r}, give a folder of text instead")
    return files + sorted(glob.glob(PYTHON_DOCS, recursive=True))


def _listed(name: str) -> list[str]:
    """The files of a list. Paths are relative to its folder. A list from the network may name addresses only."""
    if _is_address(name):
        import fsspec

        try:
            with fsspec.open(name, "rt", encoding="utf-8") as stream:
                lines = stream.read().splitlines()
        except Exception as error:
            raise DataError(f"SOURCE '@{name}' cannot be read: {first_line(error)}. {ALTERNATIVE}") from error
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
