"""Where documents come from: files (here or at an address), folders, globs, lists of files, `stdlib`, and the hub.

A source is cut into parts. The parts depend on the source alone, not on the number of workers: a part is the unit of
parallel work and of resuming.
"""

import glob
import hashlib
import logging
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lucid_attention.messages import first_line

from .readers import (
    Bad,
    DataError,
    Document,
    File,
    Part,
    Piece,
    check_text,
    decode,
    is_compressed,
    kind,
    parquet_groups,
    read,
    refuse,
    require,
)
from .remote import RemoteFile, is_address

# A small corpus is cut into about PARTS parts, so that workers finish together and a kill loses little.
PARTS = 64
SMALLEST_PART = 1 << 20
# Where Debian and others put the documentation of Python.
PYTHON_DOCS = "/usr/share/doc/python3*/html/_sources/**/*.txt"
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# The files of Dolma, as its authors list them.
DOLMA = "@https://huggingface.co/datasets/allenai/dolma/resolve/main/urls/v1_7.txt"
ALTERNATIVE = "Without the hub, give a local file, folder or glob of .txt, .jsonl(.gz/.zst) or .parquet, or 'stdlib'"


class Source(Protocol):
    """The input of `lucid tokenize`."""

    def parts(self, largest: int, bad: Bad = refuse) -> Sequence[Part]:
        """The parts, of about `largest` bytes at most. `bad` receives the error of a file that cannot be cut."""
        ...

    def documents(self, part: Part, bad: Bad = refuse) -> Iterator[Document]:
        """The documents of a part, in order, the same ones every time. `bad` receives the error of a bad document."""
        ...

    def describe(self) -> dict[str, Any]:
        """The identity of this source, in JSON types. Its `name` is for readers only: two names may be one source."""
        ...

    def changed_after(self, nanoseconds: int) -> str | None:
        """The name of a file that changed after a time, of which `describe` may tell nothing; None if there is none."""
        ...


def open_source(name: str, *, field: str = "text", split: str = "train", config: str | None = None) -> Source:
    """A source by its name.

    name: a file, a folder (all its files that are not hidden), a glob such as "corpus/**/*.md", "stdlib" (the source
        files of Python's standard library, with its documentation if that is installed), "hf:NAME" or
        "hf:NAME:CONFIG" (a data set of the hub, streamed). A file is one document of text, unless its name ends in
        .jsonl, .ndjson, .json or .parquet. All but .parquet may be compressed (.gz, .zst). Also the address of such
        a file (https://...), and "@LIST", the path or address of a list of files: a path or address a line.
    field: key or column that holds the text, in JSON lines, Parquet and data sets.
    split, config: of a data set of the hub.
    """
    if name.startswith("hf:") and not is_address(name):
        dataset, _, named_config = name.removeprefix("hf:").partition(":")
        if not dataset:
            raise DataError(f"SOURCE must be hf:NAME or hf:NAME:CONFIG, got {name!r}")
        if config and named_config and config != named_config:
            raise DataError(f"--config must be that of SOURCE, {named_config!r}, got {config!r}")
        return HubSource(dataset, config or named_config or None, split=split, field=field)
    if config:
        raise DataError(f"--config is for a data set of the hub (hf:NAME), got {config!r} for SOURCE {name!r}")
    if name.startswith("@"):
        return FileSource(name, _listed(name.removeprefix("@")), field=field)
    files = _standard_library() if name == "stdlib" else _files(name)
    return FileSource(name, dict(sorted(files.items())), field=field)


class FileSource:
    """A source of files. `files` maps names, which must be the same in every run, to the files, in their order."""

    def __init__(self, name: str, files: Mapping[str, File], *, field: str = "text") -> None:
        self.name = name
        self.field = field
        self._files = dict(files)
        self._names = {path: name for name, path in self._files.items()}

    def describe(self) -> dict[str, Any]:
        sizes = {name: _size(path) for name, path in self._files.items()}
        listing = "".join(f"{name}\0{size}\n" for name, size in sizes.items())
        return {
            "name": self.name,
            "files": len(sizes),
            "bytes": sum(sizes.values()),
            "listing_sha256": hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest(),
        }

    def changed_after(self, nanoseconds: int) -> str | None:
        local = ((name, path) for name, path in self._files.items() if isinstance(path, Path))
        return next((name for name, path in local if path.stat().st_mtime_ns > nanoseconds), None)

    def parts(self, largest: int, bad: Bad = refuse) -> list[Part]:
        total = sum(map(_size, self._files.values()))
        target = min(max(total // PARTS, SMALLEST_PART), largest)
        parts: list[Part] = []
        pieces: list[Piece] = []
        part_size = 0
        for piece, size in self._pieces(target, bad):
            # A file of unknown size is a part of its own.
            if pieces and (part_size + size > target or isinstance(pieces[-1].path, RemoteFile)):
                parts.append(Part(len(parts), part_size, tuple(pieces)))
                pieces, part_size = [], 0
            pieces.append(piece)
            part_size += size
        return [*parts, Part(len(parts), part_size, tuple(pieces))]

    def _pieces(self, target: int, bad: Bad) -> Iterator[tuple[Piece, int]]:
        """Pieces with their sizes in bytes. Files of lines are cut at `target` bytes, Parquet at its row groups."""
        for path in self._files.values():
            file_size = _size(path)
            if kind(path) == "parquet":
                try:
                    groups = parquet_groups(path, self.field)
                except DataError as error:
                    bad(error)
                    # One piece, so that reading it counts the file as bad.
                    yield Piece(path), file_size
                    continue
                for group, group_size in enumerate(groups):
                    yield Piece(path, group, group + 1), group_size
            elif kind(path) == "lines" and not is_compressed(path) and isinstance(path, Path):
                for start in range(0, file_size, target):
                    stop = min(start + target, file_size)
                    yield Piece(path, start, stop), stop - start
            else:
                yield Piece(path), file_size

    def documents(self, part: Part, bad: Bad = refuse) -> Iterator[Document]:
        for piece in part.pieces:
            name = self._names[piece.path]
            for document in read(piece, self.field, bad):
                yield document._replace(file=name)


class HubSource:
    """A data set of the hub by its name, or a folder in a layout that `datasets` knows, streamed while it is read.

    The parts are the shards of the data set.
    """

    def __init__(self, dataset: str, config: str | None = None, *, split: str = "train", field: str = "text") -> None:
        self.dataset = dataset
        self.config = config
        self.split = split
        self.field = field
        self._stream = self._load()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_stream"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._stream = self._load()

    def describe(self) -> dict[str, Any]:
        return {
            "name": f"hf:{self.dataset}" + (f":{self.config}" if self.config else ""),
            "dataset": self.dataset,
            "config": self.config,
            "split": self.split,
            "shards": self._stream.num_shards,
        }

    def changed_after(self, nanoseconds: int) -> str | None:
        return None

    def parts(self, largest: int, bad: Bad = refuse) -> list[Part]:
        return [Part(index, 0, shard=index) for index in range(self._stream.num_shards)]

    def documents(self, part: Part, bad: Bad = refuse) -> Iterator[Document]:
        rows = iter(self._stream.shard(num_shards=self._stream.num_shards, index=part.shard))
        number = 0
        while True:
            with self._one_sentence_errors():
                row = next(rows, None)
            if row is None:
                return
            number += 1
            where = f"{self.dataset}, split {self.split}, shard {part.shard}, row {number}"
            if self.field not in row:
                names = ", ".join(map(repr, row))
                raise DataError(f"{where}: no column {self.field!r}, got {names}: choose one with --field")
            try:
                text = check_text(row[self.field], where, f"column {self.field!r}")
            except DataError as error:
                bad(error)
            else:
                yield Document(text, len(text), f"shard {part.shard}")

    def _load(self) -> Any:
        datasets = require("datasets", f"SOURCE 'hf:{self.dataset}'")
        with self._one_sentence_errors():
            return datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=True)

    @contextmanager
    def _one_sentence_errors(self) -> Iterator[None]:
        """Turn any exception into a DataError of one sentence: the libraries below have no common exception class."""
        logger = logging.getLogger("huggingface_hub")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        except Exception as error:
            sentence = first_line(error)
            has_script = "dataset scripts" in sentence.lower()
            way_out = f"Give a list of its files instead, such as {DOLMA} for Dolma" if has_script else ALTERNATIVE
            raise DataError(
                f"data set {self.dataset!r} (config {self.config}, split {self.split!r}) cannot be read: {sentence}. "
                f"{way_out}"
            ) from error
        finally:
            logger.setLevel(level)


def _size(file: File) -> int:
    """Bytes of a file; 0 for a remote one, whose server is not asked."""
    return file.stat().st_size if isinstance(file, Path) else 0


def _remote(address: str) -> RemoteFile:
    file = RemoteFile(address)
    if kind(file) == "parquet":
        raise DataError(f"{address}: Parquet is read from this machine or the hub only: give a copy, or hf:NAME")
    return file


def _listed(name: str) -> dict[str, File]:
    """The files of a list, in its order. Paths are relative to the folder of the list."""
    where: File = RemoteFile(name) if is_address(name) else Path(name)
    if isinstance(where, Path) and not where.is_file():
        raise DataError(
            f"SOURCE '@{name}' must be @LIST, where LIST is a file of paths and addresses; it does not exist"
        )
    with where.open("rb") as stream:
        lines = decode(stream.read(), str(where)).splitlines()
    files: dict[str, File] = {}
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        if entry in files:
            raise DataError(f"{where}, line {number}: {entry} is listed twice")
        if is_address(entry):
            files[entry] = _remote(entry)
        elif isinstance(where, Path) and (path := where.parent / entry).is_file():
            files[entry] = path
        else:
            raise DataError(f"{where}, line {number}: {entry!r} is no file, and no address such as https://...")
    if not files:
        raise DataError(f"{where}: the list holds no files")
    return files


def _files(name: str) -> Mapping[str, File]:
    if is_address(name):
        return {name: _remote(name)}
    path = Path(name)
    if path.is_file():
        return {path.name: path}
    if path.is_dir():
        relative = {file.relative_to(path): file for file in path.rglob("*") if file.is_file()}
        files = {
            key.as_posix(): file
            for key, file in relative.items()
            if not any(folder.startswith(".") for folder in key.parts)
        }
        if not files:
            raise DataError(f"SOURCE {name!r} is a folder without files (hidden ones are left out)")
        return files
    if not glob.has_magic(name):
        raise DataError(
            f"SOURCE {name!r} does not exist: expected a file, a folder, a glob in quotes, 'stdlib', or 'hf:NAME'"
        )
    matches = [file for file in map(Path, glob.glob(name, recursive=True)) if file.is_file()]
    if not matches:
        raise DataError(f"SOURCE {name!r} matches no file")
    return {file.as_posix(): file for file in matches}


def _standard_library() -> Mapping[str, File]:
    """Python's own source files, without its tests: some of those have broken encodings on purpose."""
    root = Path(sysconfig.get_path("stdlib"))
    relative = {file.relative_to(root): file for file in root.rglob("*.py")}
    files = {key.as_posix(): file for key, file in relative.items() if not SKIPPED_FOLDERS.intersection(key.parts)}
    if not files:
        raise DataError(f"SOURCE 'stdlib': no Python sources in {str(root)!r}, give a folder of text instead")
    return files | {f"doc/{file}": Path(file) for file in glob.glob(PYTHON_DOCS, recursive=True)}
