"""Checkpoints that are whole or not there.

A checkpoint is written in a folder of its own beside the others, gets a list of its files with their sizes and hashes
(`complete.json`), and is then renamed. What has no such list, or does not agree with it, is damaged.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

COMPLETE = "complete.json"
UNFINISHED = "unfinished"
PARTIAL = ".partial"


class Found(NamedTuple):
    """The newest checkpoint that is whole, and what is wrong with newer ones."""

    folder: Path | None
    damaged: list[str]


def checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, newest first."""
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step), key=lambda path: -step_of(path))


def step_of(folder: Path) -> int:
    """The training step of a checkpoint."""
    return int(folder.name.removeprefix("checkpoint-"))


def seal(written: Path, to: Path) -> None:
    """Make a written folder a checkpoint: list its files, wait until they are on disk, rename it."""
    files = {}
    for path in sorted(written.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            files[path.relative_to(written).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    complete = written / COMPLETE
    complete.write_text(json.dumps({"files": files}, indent=1))
    with complete.open("rb") as file:
        os.fsync(file.fileno())
    if to.exists():
        # A damaged one of the same step, from before.
        shutil.rmtree(to)
    written.rename(to)
    _sync_folder(to.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a sentence; None for a whole one."""
    try:
        files = json.loads((folder / COMPLETE).read_text())["files"]
        listed = [(folder / name, int(each["bytes"]), str(each["sha256"])) for name, each in files.items()]
    except FileNotFoundError:
        return f"{folder}: {COMPLETE} is missing, it was not written to the end"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / COMPLETE}: cannot be read"
    for path, size, digest in listed:
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != size:
            return f"{path}: expected {size} bytes, got {path.stat().st_size}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{path}: its content has changed since it was written"
    return None


def newest(run: Path) -> Found:
    """The newest checkpoint of a run that is whole."""
    damaged: list[str] = []
    for folder in checkpoints(run):
        wrong = problem(folder)
        if wrong is None:
            return Found(folder, damaged)
        damaged.append(wrong)
    return Found(None, damaged)


def rotate(run: Path, keep: int, step: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and those beyond it: of a future that did not come."""
    kept = [folder for folder in checkpoints(run) if step_of(folder) <= step][:keep]
    for folder in checkpoints(run):
        if folder in kept:
            continue
        # Its list goes first: a half removed one is damaged, and known to be.
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)
