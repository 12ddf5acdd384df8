"""Token shards: files of token ids that are read in place, and the manifest that lists them.

A folder of tokens holds the tokenizer, `manifest.json`, and two files for every shard:
NAME.bin: a header of 64 bytes (magic, version, bytes per token, SHA-256 of the tokenizer), then the ids, little-endian
uint16 or uint32.
NAME.ends.npy: for every document, the number of ids up to its end, int64.
The manifest is written last: a folder without it is unfinished.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lucid_attention.files import finish, partial_path, read_json, write_whole
from lucid_attention.messages import first_line

from .readers import DataError

FORMAT, VERSION = "lucid-tokens", 1
MAGIC = b"LUCIDTOK"
HEADER = 64
SPLITS = ("train", "validation")
MANIFEST = "manifest.json"
# The subfolder of an unfinished run: its settings, and records of its finished parts.
UNFINISHED = "unfinished"
# Files of shards whose content was compared with the manifest: name to size, time of change and checksum.
VERIFIED = "verified.json"


class Shard(NamedTuple):
    """A shard as the manifest lists it."""

    name: str
    split: str
    documents: int
    tokens: int
    sha256: str
    ends_sha256: str


class TokenFolder(NamedTuple):
    """A finished folder of tokens. `open_folder` has checked its shards."""

    path: Path
    manifest: dict[str, Any]
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the ids on disk."""
        return np.dtype(self.manifest["dtype"])

    @property
    def vocab_size(self) -> int:
        """The largest id of the tokenizer, plus one."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of tokenizer.json."""
        return str(self.manifest["tokenizer"]["sha256"])


def id_type(vocab_size: int) -> str:
    """The narrowest type that holds every id of the vocabulary."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def header(dtype: str, tokenizer_hash: str) -> bytes:
    """The header of a shard."""
    fields = MAGIC + VERSION.to_bytes(4, "little") + np.dtype(dtype).itemsize.to_bytes(4, "little")
    return (fields + bytes.fromhex(tokenizer_hash)).ljust(HEADER, b"\0")


class ShardWriter:
    """Writes one shard. `close` gives its files their names."""

    def __init__(self, folder: Path, name: str, split: str, dtype: str, tokenizer_hash: str) -> None:
        self.name, self.split, self.dtype = name, split, dtype
        self.ends: list[int] = []
        self.tokens = 0
        self._ids_path, self._ends_path = shard_files(folder, name)
        self._file = partial_path(self._ids_path).open("wb")
        self._sha256 = hashlib.sha256()
        self._write(header(dtype, tokenizer_hash))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._sha256.update(content)

    def add(self, ids: Sequence[int]) -> None:
        """Append a document."""
        self._write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)
        self.ends.append(self.tokens)

    def close(self) -> Shard:
        """Finish both files of the shard."""
        finish(self._file, self._ids_path)
        with partial_path(self._ends_path).open("wb") as file:
            np.save(file, np.asarray(self.ends, dtype="<i8"))
            finish(file, self._ends_path)
        ids_hash, ends_hash = self._sha256.hexdigest(), file_hash(self._ends_path)
        return Shard(self.name, self.split, len(self.ends), self.tokens, ids_hash, ends_hash)

    def abandon(self) -> None:
        """Remove the files of a shard that is not closed."""
        self._file.close()
        partial_path(self._ids_path).unlink(missing_ok=True)


def shard_files(folder: Path, name: str) -> tuple[Path, Path]:
    """The paths of a shard's ids and of the ends of its documents."""
    return folder / f"{name}.bin", folder / f"{name}.ends.npy"


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder."""
    if not (folder / MANIFEST).is_file():
        if (folder / UNFINISHED).is_dir():
            raise DataError(f"{folder} is not finished: run the same `lucid tokenize` again to resume it")
        raise DataError(f"{folder} holds no {MANIFEST}: expected a folder written by `lucid tokenize`")
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST)
        version = manifest["format"], manifest["version"]
        if version == (FORMAT, VERSION):
            _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {type(error).__name__}: {first_line(error)}") from error
    if version != (FORMAT, VERSION):
        raise DataError(f"{folder / MANIFEST} must be of format {FORMAT} {VERSION}, got {version[0]} {version[1]}")
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError for a manifest from which no folder can be opened."""
    tokenizer = manifest["tokenizer"]
    if type(tokenizer["vocab_size"]) is not int or len(bytes.fromhex(tokenizer["sha256"])) != 32:
        raise ValueError("'tokenizer' must have a vocab_size and a sha256")
    if manifest["dtype"] != id_type(tokenizer["vocab_size"]):
        raise ValueError(f"dtype must be {id_type(tokenizer['vocab_size'])}, got {manifest['dtype']!r}")
    types = list(Shard.__annotations__.values())
    for entry in manifest["shards"]:
        shard = Shard(**entry)
        is_valid = all(type(value) is kind for value, kind in zip(shard, types, strict=True))
        if not is_valid or shard.split not in SPLITS or Path(shard.name).name != shard.name or shard.tokens < 0:
            raise ValueError(f"not a shard: {entry}")


def open_folder(folder: str | Path, *, verify: bool = False, expect_tokenizer_hash: str | None = None) -> TokenFolder:
    """Open a folder of tokens. A DataError names the first shard that is missing, truncated or of another tokenizer.

    verify: also read all shards and compare checksums, which finds an altered byte. This takes a second per gigabyte,
        once: `VERIFIED` remembers it.
    expect_tokenizer_hash: refuse tokens of a tokenizer with another hash, such as that of another model.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: expected one written by `lucid tokenize`")
    manifest = read_manifest(path)
    opened = TokenFolder(path, manifest, tuple(Shard(**shard) for shard in manifest["shards"]))
    stored = opened.tokenizer_hash
    if expect_tokenizer_hash is not None and stored != expect_tokenizer_hash:
        raise DataError(
            f"{path} has tokens of another tokenizer: expected hash {expect_tokenizer_hash[:12]}…, got {stored[:12]}…"
        )
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise DataError(f"{tokenizer} is missing")
    if (actual := file_hash(tokenizer)) != stored:
        raise DataError(f"{tokenizer} is not the one of the shards: expected hash {stored[:12]}…, got {actual[:12]}…")
    for shard in opened.shards:
        check_shard(path, shard, manifest["dtype"], stored)
    if verify:
        _verify(opened)
    return opened


def _verify(opened: TokenFolder) -> None:
    """Compare checksums of all shards. Files with the size and time of an earlier comparison are not read again."""
    file = opened.path / VERIFIED
    try:
        earlier = read_json(file)
    except (OSError, ValueError):
        earlier = {}
    verified = {}
    for shard in opened.shards:
        for path, expected in zip(shard_files(opened.path, shard.name), (shard.sha256, shard.ends_sha256), strict=True):
            status = path.stat()
            state = [status.st_size, status.st_mtime_ns, expected]
            if earlier.get(path.name) != state and (actual := file_hash(path)) != expected:
                raise DataError(
                    f"{path} was altered: expected checksum {expected[:12]}…, got {actual[:12]}…. Remove "
                    f"{opened.path} and tokenize again"
                )
            verified[path.name] = state
    if verified != earlier:
        # A folder that cannot be written is verified every time.
        with suppress(OSError):
            write_whole(file, json.dumps(verified))


def check_shard(folder: Path, shard: Shard, dtype: str, tokenizer_hash: str) -> None:
    """Refuse a shard that is missing, truncated or of another tokenizer."""
    ids, ends = shard_files(folder, shard.name)
    for file in (ids, ends):
        if not file.is_file():
            raise DataError(f"{file} is missing")
    expected = header(dtype, tokenizer_hash)
    with ids.open("rb") as stream:
        actual = stream.read(HEADER)
    if not actual.startswith(MAGIC[: len(actual)]):
        raise DataError(f"{ids} is not a token shard: expected it to begin with {MAGIC!r}, got {actual[:8]!r}")
    if len(actual) == HEADER and actual[16:48] != expected[16:48]:
        raise DataError(
            f"{ids} is of another tokenizer: expected hash {tokenizer_hash[:12]}…, got {actual[16:48].hex()[:12]}…"
        )
    size = HEADER + shard.tokens * np.dtype(dtype).itemsize
    if actual != expected or ids.stat().st_size != size:
        raise DataError(f"{ids} is truncated or altered: expected {size} bytes of {dtype}, got {ids.stat().st_size}")
    documents = read_ends(folder, shard).size
    if documents != shard.documents:
        raise DataError(f"{ends} must have {shard.documents} documents, got {documents}")


def read_ends(folder: Path, shard: Shard) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For every document of a shard, the number of ids up to its end."""
    file = shard_files(folder, shard.name)[1]
    try:
        ends = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{file} is damaged: {error}") from error
    if ends.ndim != 1 or ends.dtype != np.dtype("<i8") or (ends.size and ends[-1] != shard.tokens):
        raise DataError(f"{file} does not belong to {shard.name}.bin: expected its last end to be {shard.tokens}")
    return ends


def read_ids(
    folder: Path, shard: Shard, dtype: np.dtype[Any], start: int, stop: int, vocab_size: int | None = None
) -> np.ndarray[Any, Any]:
    """Ids [start, stop) of a shard, as int64. Ids beyond the vocabulary, if it is given, are refused.

    The memory map is closed after the call. An open one would keep a file handle for each shard, and every page it
    touched would count as memory of this process.
    """
    offset = HEADER + start * dtype.itemsize
    file = shard_files(folder, shard.name)[0]
    try:
        ids = np.memmap(file, dtype, "r", offset=offset, shape=(stop - start,)).astype(np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {first_line(error)}") from error
    if vocab_size is not None and ids.size and (largest := int(ids.max())) >= vocab_size:
        raise DataError(f"{file} was altered: expected ids below {vocab_size}, the vocabulary, got {largest}")
    return ids
