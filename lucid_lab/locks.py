"""One run at a time in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


class FolderInUse(ValueError):
    """Another process writes into the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` against every other run while the block runs. The end of a process releases its lock.

    The folder and those above it are made if they do not exist, and removed again if the block leaves nothing in them.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(
            f"{folder} is being written by another process: wait for it to end, or choose another folder. If none "
            f"runs, remove {file}"
        ) from None
    try:
        yield
    finally:
        # filelock notices when the file that it waited for was removed, and makes a new one.
        file.unlink(missing_ok=True)
        lock.release()
        # rmdir refuses a folder with files.
        with suppress(OSError):
            for path in new_folders:
                path.rmdir()
