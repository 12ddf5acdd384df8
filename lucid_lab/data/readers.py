"""Documents of one file, in order: text, JSON lines, Parquet; plain, .gz or .zst.

The error of a bad document is passed to the callback `bad`. If `bad` returns, reading continues with the next document.
So it does after a file that cannot be opened. Other errors of a file, such as missing permission, are raised.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn, Protocol

from lucid_attention.messages import first_line

LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
BLOCK = 1 << 16


class DataError(ValueError):
    """Wrong data, or a wrong folder of tokens. The message names the file, the expected content and the actual one."""


Bad = Callable[[DataError], None]


def require(package: str, purpose: str) -> Any:
    """Import an optional package. If it is missing, the error names the extra that installs it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise DataError(f'{purpose} needs the package {package!r}: pip install "lucid-attention[train]"') from error


class File(Protocol):
    """A file that can be read: a `Path`, or a `RemoteFile`."""

    @property
    def name(self) -> str: ...

    @property
    def suffix(self) -> str: ...

    @property
    def suffixes(self) -> Sequence[str]: ...

    def open(self, mode: Literal["rb"]) -> Any: ...


class Document(NamedTuple):
    """A text, the number of bytes of the source that it took, and the name of its file."""

    text: str
    size: int
    file: str = ""


class Piece(NamedTuple):
    """A file, or a range [start, stop) of it: bytes for JSON lines, row groups for Parquet.

    A line belongs to the range that holds its first byte.
    """

    path: File
    start: int = 0
    stop: int | None = None


class Part(NamedTuple):
    """A fixed share of a source: the unit of parallel work.

    number: its place in the order of the source. size: in bytes of the source, 0 if unknown. shard: of a data set of
    the hub.
    """

    number: int
    size: int
    pieces: tuple[Piece, ...] = ()
    shard: int = 0


def refuse(error: DataError) -> NoReturn:
    """The `bad` callback of a command that cannot leave documents out."""
    raise error


def stop_at(error: DataError) -> NoReturn:
    """The `bad` callback of `lucid tokenize`, which could leave documents out and stops at the first bad one."""
    raise DataError(f"{error}. Mend it and run the same command again, or leave such documents out with --skip-bad")


def kind(path: File) -> str:
    """The kind of a file by its name: "lines", "parquet" or "text"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    if suffixes and suffixes[-1] in LINES:
        return "lines"
    return "parquet" if suffixes and suffixes[-1] == ".parquet" else "text"


def is_compressed(path: File) -> bool:
    """Whether the file's name ends in .gz or .zst."""
    return path.suffix.lower() in COMPRESSED


def read(piece: Piece, field: str, bad: Bad = refuse) -> Iterator[Document]:
    """The documents of a piece, in order. `field` is the key (JSON lines) or column (Parquet) of the text."""
    reader = {"lines": _read_lines, "parquet": _read_parquet, "text": _read_text}[kind(piece.path)]
    try:
        yield from reader(piece, field, bad)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        bad(DataError(f"{piece.path} is damaged: {error}"))
    except OSError as error:
        raise DataError(f"{piece.path} cannot be read: {error.strerror or error}") from error


def check_text(text: Any, where: str, name: str) -> str:
    """`text`, if it is a string that UTF-8 can encode. `where` and `name` are for the message."""
    if not isinstance(text, str):
        raise DataError(f"{where}: {name} must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {name} holds half a surrogate pair at character {error.start}") from None
    return text


def decode(content: bytes, where: str, offset: int = 0) -> str:
    """Bytes as text. `offset` is the position of `content` in the file, for the message."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where} is not UTF-8: it has the byte order mark of UTF-16 at offset {offset}")
    if (zero := content.find(0)) >= 0:
        raise DataError(f"{where} is binary, not text: zero byte at offset {offset + zero}")
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        position, byte = offset + error.start, content[error.start]
        raise DataError(f"{where} is not UTF-8: byte 0x{byte:02x} at offset {position}") from None


def _read_text(piece: Piece, field: str, bad: Bad) -> Iterator[Document]:
    with _open(piece.path) as (stream, raw):
        content = stream.read()
        size = raw.tell()
    try:
        text = decode(content, str(piece.path))
    except DataError as error:
        bad(error)
    else:
        yield Document(text, size)


def _read_lines(piece: Piece, field: str, bad: Bad) -> Iterator[Document]:
    path, start, stop = piece
    with _open(path) as (stream, raw):
        first = start
        if start:
            # The line that holds byte start - 1 belongs to the previous piece: skip the rest of it.
            stream.seek(start - 1)
            first += len(stream.readline()) - 1
        offset, reported = first, first
        for number, line in enumerate(stream, 1):
            if stop is not None and offset >= stop:
                return
            line_start, offset = offset, offset + len(line)
            if line.isspace():
                continue
            try:
                text = _parse_line(line, line_start, field)
            except DataError as error:
                bad(DataError(f"{path}, line {_lines_before(path, first) + number}: {error}"))
            else:
                position = raw.tell()
                yield Document(text, position - reported)
                reported = position


def _parse_line(line: bytes, offset: int, field: str) -> str:
    try:
        record = json.loads(decode(line, "the line", offset))
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError("not JSON: nested too deeply") from None
    # A number with too many digits.
    except ValueError as error:
        raise DataError(f"not JSON that can be read: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"expected one JSON object a line, got {type(record).__name__}")
    if field not in record:
        raise DataError(f"no field {field!r}, got {', '.join(map(repr, record)) or 'none'}: choose one with --field")
    return check_text(record[field], "the line", f"field {field!r}")


def _lines_before(path: File, offset: int) -> int:
    """The number of lines that end before `offset`. It reads the file again: only error messages need the number."""
    count, bytes_left = 0, offset
    with path.open("rb") as file:
        while bytes_left > 0 and (block := file.read(min(bytes_left, BLOCK))):
            count += block.count(b"\n")
            bytes_left -= len(block)
    return count


def parquet_groups(path: File, field: str) -> list[int]:
    """The size of each row group of a Parquet file, in bytes. A file without rows or without the column is refused."""
    with _open_parquet(path) as file:
        names = file.schema_arrow.names
        if field not in names:
            raise DataError(f"{path}: no column {field!r}, got {', '.join(map(repr, names))}: choose one with --field")
        if not file.metadata.num_rows:
            raise DataError(f"{path} is empty: it has no rows")
        return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]


def _open_parquet(path: File) -> Any:
    parquet = require("pyarrow.parquet", "reading Parquet")
    arrow = require("pyarrow", "reading Parquet")
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {first_line(error)}") from error


def _read_parquet(piece: Piece, field: str, bad: Bad) -> Iterator[Document]:
    arrow = require("pyarrow", "reading Parquet")
    try:
        parquet_groups(piece.path, field)
    except DataError as error:
        bad(error)
        return
    with _open_parquet(piece.path) as file:
        stop = file.num_row_groups if piece.stop is None else piece.stop
        row = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
        for group in range(piece.start, stop):
            metadata = file.metadata.row_group(group)
            bytes_per_row = metadata.total_byte_size // max(metadata.num_rows, 1)
            try:
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        row += 1
                        try:
                            text = check_text(value.as_py(), f"{piece.path}, row {row}", f"column {field!r}")
                        except (DataError, UnicodeDecodeError) as error:
                            bad(error if isinstance(error, DataError) else _not_utf8(piece.path, row, error))
                        else:
                            yield Document(text, bytes_per_row)
            except (arrow.ArrowInvalid, OSError) as error:
                bad(DataError(f"{piece.path} is damaged in row group {group}: {first_line(error)}"))


def _not_utf8(path: File, row: int, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path}, row {row} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}")


@contextmanager
def _open(path: File) -> Iterator[tuple[Any, BinaryIO]]:
    """A stream of the decompressed bytes, and the file on disk, whose position measures the progress."""
    with path.open("rb") as raw:
        suffix = path.suffix.lower()
        if suffix == ".gz":
            yield gzip.GzipFile(fileobj=raw), raw
        elif suffix == ".zst":
            yield io.BufferedReader(_ChunkStream(_decompress_zst(raw)), BLOCK), raw
        else:
            yield raw, raw


def _decompress_zst(raw: BinaryIO) -> Iterator[bytes]:
    """The content of one or more Zstandard frames. zstandard's own reader accepts a truncated file without an error."""
    zstandard = require("zstandard", "reading .zst")
    frame = None
    while chunk := raw.read(BLOCK):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise EOFError(first_line(error)) from error
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends before its compressed stream does")


class _ChunkStream(io.RawIOBase):
    """A file whose content comes from an iterator of bytes."""

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
