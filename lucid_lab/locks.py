"""One run at a time in a folder."""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lucid_attention.files import read_json

LOCK = ".lock"


class FolderInUse(ValueError):
    """Another process writes into the folder: who it is, and the way out if it no longer runs."""


@contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Lock `folder` against every other run while the block runs. The end of a process releases its lock.

    The folder and those above it are made if they do not exist, and removed again if the block leaves nothing in them.
    command: such as "lucid train", for the message of the run that comes second.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FolderInUse(_message(folder, file)) from None
    try:
        holder = {"command": command, "process": os.getpid(), "machine": platform.node(), "time": time.time()}
        _holder_file(file).write_text(json.dumps(holder))
        yield
    finally:
        _holder_file(file).unlink(missing_ok=True)
        # filelock notices when the file that it waited for was removed, and makes a new one.
        file.unlink(missing_ok=True)
        lock.release()
        # rmdir refuses a folder with files.
        with suppress(OSError):
            for path in new_folders:
                path.rmdir()


def _holder_file(lock: Path) -> Path:
    return lock.with_name(lock.name + ".json")


def _message(folder: Path, lock: Path) -> str:
    try:
        holder = read_json(_holder_file(lock))
        who = f"`{holder['command']}` (process {holder['process']} on {holder['machine']})"
    except (OSError, ValueError, KeyError):
        who = "process"
    return (
        f"{folder} is being written by another {who}: wait for it to end, or choose another folder. "
        f"If it no longer runs, remove {lock}"
    )
