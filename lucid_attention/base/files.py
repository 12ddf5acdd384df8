"""Files that are there whole or not at all, also after a kill or a loss of power."""

import os
from pathlib import Path
from typing import IO

PARTIAL = ".partial"


def partial_path(path: Path) -> Path:
    """Where `path` is written before it gets its name."""
    return path.with_name(path.name + PARTIAL)


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write `content` (text as UTF-8) beside `path`, then rename it: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            finish(file, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            # The system names no path when a write fails, as on a full disk.
            error.filename = str(path)
        raise
    return path


def finish(file: IO[bytes], path: Path) -> None:
    """Close `file`, which was opened at `partial_path(path)`, and give it its name once its content is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    partial_path(path).replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring new names in `folder` to the disk: a folder is a file of its own."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
