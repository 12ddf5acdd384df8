"""Where documents come from: files, folders and globs, `stdlib`, and data sets of the Hugging Face hub.

A source is cut into parts that depend on the source alone, never on the number of workers: a part is the unit of
parallel work and of resuming.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import DataError
from .hub import HubSource
from .readers import Bad, Document, Part, Piece, is_compressed, kind, parquet_groups, read, stop_at

# A small corpus is cut finely, so that workers finish together and a kill loses little.
PARTS = 64
SMALLEST_PART = 1 << 20
# Where Debian and others put the documentation of Python.
PYTHON_DOCS = "/usr/share/doc/python3*/html/_sources/**/*.txt"
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source(Protocol):
    """What `lucid tokenize` reads."""

    def parts(self, largest: int) -> Sequence[Part]:
        """The parts, of about `largest` bytes at most."""
        ...

    def documents(self, part: Part, bad: Bad = stop_at) -> Iterator[Document]:
        """The documents of a part, in order, the same ones every time."""
        ...

    def describe(self) -> dict[str, Any]:
        """What tells this source from another one; `name` is only for the reader."""
        ...


def open_source(name: str, *, field: str = "text", split: str = "train") -> Source:
    """A source by its name.

    name: a file, a folder (every file in it that is not hidden), a glob such as "corpus/**/*.md", "stdlib" (the
        sources of Python's standard library, and its documentation where that is installed), or "hf:NAME" or
        "hf:NAME:CONFIG" (a data set of the hub, streamed). Files are text, one document each, unless their names end
        in .jsonl, .json or .parquet; .gz and .zst may follow.
    field: key or column that holds the text, in JSON lines, Parquet and data sets.
    split: of a data set of the hub.
    """
    if name.startswith("hf:"):
        dataset, _, config = name.removeprefix("hf:").partition(":")
        if not dataset:
            raise DataError(f"SOURCE must be hf:NAME or hf:NAME:CONFIG, got {name!r}")
        return HubSource(dataset, config or None, split=split, field=field)
    if name == "stdlib":
        return FileSource(name, _standard_library(), field=field)
    return FileSource(name, _files(name), field=field)


class FileSource:
    """Files: `files` maps a name that is the same on every run to a path."""

    def __init__(self, name: str, files: dict[str, Path], *, field: str = "text") -> None:
        self.name = name
        self.field = field
        self._files = dict(sorted(files.items()))

    def describe(self) -> dict[str, Any]:
        sizes = {name: path.stat().st_size for name, path in self._files.items()}
        listing = "".join(f"{name}\0{size}\n" for name, size in sizes.items())
        return {
            "name": self.name,
            "files": len(sizes),
            "bytes": sum(sizes.values()),
            "listing_sha256": hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest(),
        }

    def parts(self, largest: int) -> list[Part]:
        total = sum(path.stat().st_size for path in self._files.values())
        target = min(max(total // PARTS, SMALLEST_PART), largest)
        parts: list[Part] = []
        pieces: list[Piece] = []
        held = 0
        for piece, size in self._pieces(target):
            if pieces and held + size > target:
                parts.append(Part(len(parts), held, tuple(pieces)))
                pieces, held = [], 0
            pieces.append(piece)
            held += size
        return [*parts, Part(len(parts), held, tuple(pieces))]

    def _pieces(self, target: int) -> Iterator[tuple[Piece, int]]:
        for path in self._files.values():
            size = path.stat().st_size
            if kind(path) == "parquet":
                for group, weight in enumerate(parquet_groups(path, self.field)):
                    yield Piece(path, group, group + 1), weight
            elif kind(path) == "lines" and not is_compressed(path):
                for start in range(0, size, target):
                    stop = min(start + target, size)
                    yield Piece(path, start, stop), stop - start
            else:
                yield Piece(path), size

    def documents(self, part: Part, bad: Bad = stop_at) -> Iterator[Document]:
        for piece in part.pieces:
            yield from read(piece, self.field, bad)


def _files(name: str) -> dict[str, Path]:
    path = Path(name)
    if path.is_file():
        return {path.name: path}
    if path.is_dir():
        found = {file.relative_to(path): file for file in path.rglob("*") if file.is_file()}
        files = {key.as_posix(): file for key, file in found.items() if not any(p.startswith(".") for p in key.parts)}
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


def _standard_library() -> dict[str, Path]:
    """Python's own sources, without tests: those are full of broken encodings, on purpose."""
    root = Path(sysconfig.get_path("stdlib"))
    named = {file.relative_to(root): file for file in root.rglob("*.py")}
    files = {key.as_posix(): file for key, file in named.items() if not LEFT_OUT.intersection(key.parts)}
    if not files:
        raise DataError(f"SOURCE 'stdlib': no Python sources in {str(root)!r}, give a folder of text instead")
    return files | {f"doc/{file}": Path(file) for file in glob.glob(PYTHON_DOCS, recursive=True)}
