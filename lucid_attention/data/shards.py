"""Token shards: files of token ids that are read in place, and the manifest that tells what belongs together.

A folder holds, for every shard, NAME.bin and NAME.ends.npy, and the tokenizer. NAME.bin is a header of 64 bytes
(magic, version, bytes a token, SHA-256 of the tokenizer) and then little-endian ids, uint16 or uint32; NAME.ends.npy
has for every document the number of ids up to its end, int64. `manifest.json` is written last: a folder without it
was not finished.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from .errors import DataError

FORMAT, VERSION = "lucid-tokens", 1
MAGIC = b"LUCIDTOK"
HEADER = 64
SPLITS = ("train", "validation")
MANIFEST = "manifest.json"
# What a run that was not finished keeps here: settings and records of finished parts.
UNFINISHED = "unfinished"


class Shard(NamedTuple):
    """What the manifest says of a shard."""

    name: str
    split: str
    documents: int
    tokens: int
    sha256: str
    ends_sha256: str


class TokenFolder(NamedTuple):
    """A finished folder whose shards were found to be there, whole, and of its tokenizer."""

    path: Path
    manifest: dict[str, Any]
    shards: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids on disk."""
        return np.dtype(self.manifest["dtype"])

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of the tokenizer."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of tokenizer.json."""
        return str(self.manifest["tokenizer"]["sha256"])


def id_type(vocab_size: int) -> str:
    """The narrowest type that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def header(dtype: str, tokenizer_hash: str) -> bytes:
    """The first bytes of a shard."""
    fields = MAGIC + VERSION.to_bytes(4, "little") + np.dtype(dtype).itemsize.to_bytes(4, "little")
    return (fields + bytes.fromhex(tokenizer_hash)).ljust(HEADER, b"\0")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a loss of power."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        _settle(file, temporary, path)


def _settle(file: IO[bytes], temporary: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):
        # The new name is in the folder, and the folder is a file of its own.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class ShardWriter:
    """One shard. Its files appear under their names when it is closed."""

    def __init__(self, folder: Path, name: str, split: str, dtype: str, tokenizer_hash: str) -> None:
        self.name, self.split, self.dtype = name, split, dtype
        self.ends: list[int] = []
        self.tokens = 0
        self._path = folder / f"{name}.bin"
        self._temporary = folder / f"{name}.bin.tmp"
        self._file = self._temporary.open("wb")
        self._sum = hashlib.sha256()
        self._write(header(dtype, tokenizer_hash))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._sum.update(content)

    def add(self, ids: Sequence[int]) -> None:
        """Append a document."""
        self._write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)
        self.ends.append(self.tokens)

    def close(self) -> Shard:
        """Finish the shard."""
        _settle(self._file, self._temporary, self._path)
        ends = np.asarray(self.ends, dtype="<i8")
        path = shard_files(self._path.parent, self.name)[1]
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w+b") as file:
            np.save(file, ends)
            _settle(file, temporary, path)
        return Shard(self.name, self.split, len(self.ends), self.tokens, self._sum.hexdigest(), file_hash(path))

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def shard_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Ids and ends of documents."""
    return folder / f"{name}.bin", folder / f"{name}.ends.npy"


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder."""
    if not (folder / MANIFEST).is_file():
        if (folder / UNFINISHED).is_dir():
            raise DataError(f"{folder} was not finished: run the same `lucid tokenize` again, and it goes on")
        raise DataError(f"{folder} holds no {MANIFEST}: expected a folder written by `lucid tokenize`")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found = manifest["format"], manifest["version"]
        if found == (FORMAT, VERSION):
            _ = manifest["tokenizer"]["sha256"], manifest["dtype"], [Shard(**each) for each in manifest["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {error!r}") from error
    if found != (FORMAT, VERSION):
        raise DataError(f"{folder / MANIFEST} must be of format {FORMAT} {VERSION}, got {found[0]} {found[1]}")
    return manifest


def open_folder(folder: str | Path, *, verify: bool = False, expect_tokenizer_hash: str | None = None) -> TokenFolder:
    """Open a folder of tokens. The first shard that is missing, truncated or foreign is named in a DataError.

    verify: also read everything and compare checksums, which finds an altered byte.
    expect_tokenizer_hash: refuse tokens of another tokenizer, such as another one than a model was trained with.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: expected one written by `lucid tokenize`")
    manifest = read_manifest(path)
    opened = TokenFolder(path, manifest, tuple(Shard(**each) for each in manifest["shards"]))
    own = opened.tokenizer_hash
    if expect_tokenizer_hash is not None and own != expect_tokenizer_hash:
        raise DataError(
            f"{path} has tokens of another tokenizer: expected hash {expect_tokenizer_hash[:12]}…, got {own[:12]}…"
        )
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise DataError(f"{tokenizer} is missing")
    if (found := file_hash(tokenizer)) != own:
        raise DataError(f"{tokenizer} is not the one of the shards: expected hash {own[:12]}…, got {found[:12]}…")
    for shard in opened.shards:
        check_shard(path, shard, manifest["dtype"], own, verify=verify)
    return opened


def check_shard(folder: Path, shard: Shard, dtype: str, tokenizer_hash: str, *, verify: bool = False) -> None:
    """Raise a DataError that names the file if a shard is missing, truncated, foreign or (`verify`) altered."""
    ids, ends = shard_files(folder, shard.name)
    for file in (ids, ends):
        if not file.is_file():
            raise DataError(f"{file} is missing")
    expected = header(dtype, tokenizer_hash)
    with ids.open("rb") as stream:
        found = stream.read(HEADER)
    if not found.startswith(MAGIC[: len(found)]):
        raise DataError(f"{ids} is not a token shard: expected it to begin with {MAGIC!r}, got {found[:8]!r}")
    if len(found) == HEADER and found[16:48] != expected[16:48]:
        raise DataError(
            f"{ids} is of another tokenizer: expected hash {tokenizer_hash[:12]}…, got {found[16:48].hex()[:12]}…"
        )
    size = HEADER + shard.tokens * np.dtype(dtype).itemsize
    if found != expected or ids.stat().st_size != size:
        raise DataError(f"{ids} is truncated or altered: expected {size} bytes of {dtype}, got {ids.stat().st_size}")
    documents = read_ends(folder, shard).size
    if documents != shard.documents:
        raise DataError(f"{ends} must have {shard.documents} documents, got {documents}")
    if verify:
        for file, checksum in ((ids, shard.sha256), (ends, shard.ends_sha256)):
            if (actual := file_hash(file)) != checksum:
                raise DataError(f"{file} was altered: expected checksum {checksum[:12]}…, got {actual[:12]}…")


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


def read_ids(folder: Path, shard: Shard, dtype: np.dtype[Any], start: int, stop: int) -> np.ndarray[Any, Any]:
    """Ids [start, stop) of a shard, as int64.

    The map lives for this call only: an open one would count every page that was ever touched as memory of this
    process, and hold a file handle for each shard.
    """
    offset = HEADER + start * dtype.itemsize
    ids = np.memmap(shard_files(folder, shard.name)[0], dtype, "r", offset=offset, shape=(stop - start,))
    return ids.astype(np.int64)
