"""Files: written whole or not at all, also after a kill or a loss of power; read with checks."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any

PARTIAL = ".partial"
# The key of a record's hash.
SEAL = "content_sha256"
# The names of JSON's types.
JSON_TYPES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


class UnreadableFile(ValueError):
    """A file with other content than it should have. The message names the file, what was expected and what came."""


def partial_path(path: Path) -> Path:
    """Where `path` is written before it gets its name."""
    if not path.name:
        raise ValueError(f"what is written must have a name of its own, got {str(path)!r}")
    return path.with_name(path.name + PARTIAL)


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write `content` next to `path`, then rename it: a reader sees the old file or the new one.

    Text is written as UTF-8. What UTF-8 lacks, as in names of files in other encodings, becomes an escape.
    """
    if is_device(path):
        # The rename would replace a device such as /dev/null by a file, for every program of the machine.
        raise OSError(errno.EINVAL, "not a regular file: choose another place", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            finish(file, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # The system names no path when a write fails, as on a full disk.
            error.filename = str(path)
        raise
    return path


def write_record(path: Path, content: dict[str, Any], *, allow_nan: bool = True) -> Path:
    """Write an object as JSON, with a hash that `read_json` compares: what a later command trusts is not altered."""
    text = json.dumps(content, allow_nan=allow_nan)
    return write_whole(path, json.dumps(content | {SEAL: _content_hash(json.loads(text))}, indent=1) + "\n")


def _content_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finish(file: IO[bytes], path: Path) -> None:
    """Close `file`, which was opened at `partial_path(path)`, and give it its name once its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    partial_path(path).replace(path)
    sync_folder(path.parent)


def finish_folder(written: Path, folder: Path) -> None:
    """Give the folder `written` the name `folder` once its content is on the disk. It replaces an older `folder`."""
    for path in written.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(written)
    if folder.exists():
        shutil.rmtree(folder)
    written.rename(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring new names in `folder` to the disk: a folder is a file of its own."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_device(path: Path) -> bool:
    """Whether the path is a pipe or device: its content may never end."""
    return path.exists() and not (path.is_file() or path.is_dir())


def read_bytes(path: Path) -> bytes:
    """The content of a file. A pipe or device is refused."""
    if is_device(path):
        raise UnreadableFile(f"{path}: expected a file, got a pipe or device")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    return _decoded(read_bytes(path), str(path))


def read_json(path: Path, expected: type = dict) -> Any:
    """The content of a JSON file, which must be of a type: dict, list, or object for any."""
    return parse_json(read_bytes(path), str(path), expected)


def parse_json(content: bytes | str, where: str, expected: type = dict) -> Any:
    """The value that a JSON text holds, which must be of a type. where: the file, and the line, for errors.

    The hash of `write_record` is compared and left out.
    """
    text = _decoded(content, where) if isinstance(content, bytes) else content
    try:
        value = json.loads(text)
    except RecursionError:
        raise UnreadableFile(f"{where}: not JSON that can be read: it is nested too deeply") from None
    # Besides syntax errors: a number with too many digits.
    except ValueError as error:
        raise UnreadableFile(f"{where}: not JSON: {error}") from error
    if not isinstance(value, expected):
        got = JSON_TYPES.get(type(value), "a number")
        raise UnreadableFile(f"{where}: expected {JSON_TYPES[expected]}, got {got}")
    if isinstance(value, dict) and (digest := value.pop(SEAL, None)) not in (None, _content_hash(value)):
        raise UnreadableFile(f"{where}: was altered: its content does not match its {SEAL}, {str(digest)[:12]}")
    return value


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{where}: expected text in UTF-8, got the byte 0x{content[error.start]:02x} at {error.start}"
        ) from error
