"""Documents of one file, one after another: text, JSON lines, Parquet; plain, .gz or .zst.

What is wrong with a document goes to `bad`, which raises it, or notes it so that reading goes on behind it. What is
wrong with a whole file (a column that is missing) is raised.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from .errors import DataError, require

LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
BLOCK = 1 << 16

Bad = Callable[[DataError], None]


class Document(NamedTuple):
    """A text, and how many bytes of its source were read for it."""

    text: str
    size: int


class Piece(NamedTuple):
    """A file, or the part of it that starts in [start, stop): bytes of a file of lines, row groups of Parquet."""

    path: Path
    start: int = 0
    stop: int | None = None


class Part(NamedTuple):
    """A share of a source. `size` is in bytes of the source, 0 if unknown."""

    number: int
    size: int
    pieces: tuple[Piece, ...] = ()


def stop_at(error: DataError) -> NoReturn:
    """The rule for bad documents that is not lenient."""
    raise error


def kind(path: Path) -> str:
    """ "lines", "parquet" or "text", by the name of the file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    if suffixes and suffixes[-1] in LINES:
        return "lines"
    return "parquet" if suffixes and suffixes[-1] == ".parquet" else "text"


def is_compressed(path: Path) -> bool:
    """Whether the name of the file says so."""
    return path.suffix.lower() in COMPRESSED


def read(piece: Piece, field: str, bad: Bad = stop_at) -> Iterator[Document]:
    """The documents of a piece, in order. `field` is the key or column of JSON lines and Parquet."""
    reader = {"lines": _read_lines, "parquet": _read_parquet, "text": _read_text}[kind(piece.path)]
    try:
        yield from reader(piece, field, bad)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        bad(DataError(f"{piece.path} is damaged: {error}"))
    except OSError as error:
        raise DataError(f"{piece.path} cannot be read: {error.strerror or error}") from error


def checked(text: Any, where: str, name: str) -> str:
    """A value that is to be a document."""
    if not isinstance(text, str):
        raise DataError(f"{where}: {name} must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {name} holds half a surrogate pair at character {error.start}") from None
    return text


def decoded(content: bytes, where: str, offset: int = 0) -> str:
    """Bytes as text. `offset` is where in the file they begin."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} is not UTF-8: it has the mark of UTF-16 at offset {offset}")
    if (zero := content.find(0)) >= 0:
        raise DataError(f"{where} is binary, not text: zero byte at offset {offset + zero}")
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        position, byte = offset + error.start, content[error.start]
        raise DataError(f"{where} is not UTF-8: byte 0x{byte:02x} at offset {position}") from None


def _read_text(piece: Piece, field: str, bad: Bad) -> Iterator[Document]:
    with _opened(piece.path) as (stream, raw):
        content = stream.read()
        size = raw.tell()
    try:
        text = decoded(content, str(piece.path))
    except DataError as error:
        bad(error)
    else:
        yield Document(text, size)


def _read_lines(piece: Piece, field: str, bad: Bad) -> Iterator[Document]:
    path, start, stop = piece
    with _opened(path) as (stream, raw):
        first = start
        if start:
            # A line belongs to the piece in which it starts: what began before `start` is the neighbour's.
            stream.seek(start - 1)
            first += len(stream.readline()) - 1
        offset, seen = first, first
        for number, line in enumerate(stream, 1):
            if stop is not None and offset >= stop:
                return
            here, offset = offset, offset + len(line)
            if line.isspace():
                continue
            try:
                text = _parsed(line, here, field)
            except DataError as error:
                bad(DataError(f"{path}, line {_lines_before(path, first) + number}: {error}"))
            else:
                position = raw.tell()
                yield Document(text, position - seen)
                seen = position


def _parsed(line: bytes, offset: int, field: str) -> str:
    try:
        record = json.loads(decoded(line, "the line", offset))
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError("not JSON: nested too deeply") from None
    if not isinstance(record, dict):
        raise DataError(f"expected one JSON object a line, got {type(record).__name__}")
    if field not in record:
        raise DataError(f"no field {field!r}, got {', '.join(map(repr, record)) or 'none'}: choose one with --field")
    return checked(record[field], "the line", f"field {field!r}")


def _lines_before(path: Path, offset: int) -> int:
    """How many lines end before a byte of the file: for a message only, so it may take a while."""
    count, left = 0, offset
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, BLOCK))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def parquet_groups(path: Path, field: str) -> list[int]:
    """Bytes of each row group of a Parquet file that has rows and the column."""
    with _parquet(path) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise DataError(f"{path}: no column {field!r}, got {', '.join(map(repr, names))}: choose one with --field")
        if not file.metadata.num_rows:
            raise DataError(f"{path} is empty: it has no rows")
        return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]


def _parquet(path: Path) -> Any:
    parquet = require("pyarrow.parquet", "reading Parquet")
    arrow = require("pyarrow", "reading Parquet")
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {_first_line(error)}") from error


def _read_parquet(piece: Piece, field: str, bad: Bad) -> Iterator[Document]:
    arrow = require("pyarrow", "reading Parquet")
    with _parquet(piece.path) as file:
        stop = file.num_row_groups if piece.stop is None else piece.stop
        row = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        for group in range(piece.start, stop):
            meta = file.metadata.row_group(group)
            share = meta.total_byte_size // max(meta.num_rows, 1)
            try:
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        row += 1
                        try:
                            text = checked(value.as_py(), f"{piece.path}, row {row}", f"column {field!r}")
                        except (DataError, UnicodeDecodeError) as error:
                            bad(error if isinstance(error, DataError) else _not_utf8(piece.path, row, error))
                        else:
                            yield Document(text, share)
            except (arrow.ArrowInvalid, OSError) as error:
                bad(DataError(f"{piece.path} is damaged in row group {group}: {_first_line(error)}"))


def _not_utf8(path: Path, row: int, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path}, row {row} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """Both ends of a file: the text that comes out, and the file itself, whose position tells the progress."""
    with path.open("rb") as raw:
        suffix = path.suffix.lower()
        if suffix == ".gz":
            yield gzip.GzipFile(fileobj=raw), raw
        elif suffix == ".zst":
            yield io.BufferedReader(_Chunks(_inflated(raw)), BLOCK), raw
        else:
            yield raw, raw


def _inflated(raw: BinaryIO) -> Iterator[bytes]:
    """Zstandard frames, one or many. The package's own reader takes a truncated file for a short one."""
    zstandard = require("zstandard", "reading .zst")
    frame = None
    while chunk := raw.read(BLOCK):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise EOFError(_first_line(error)) from error
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends before its compressed stream does")


class _Chunks(io.RawIOBase):
    """An iterator of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
