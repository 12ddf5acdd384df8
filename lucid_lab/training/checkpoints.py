"""Checkpoints that are whole or do not exist.

The trainer writes a checkpoint in `UNFINISHED`. `finish_checkpoint` lists its files with sizes and hashes in `COMPLETE`
and moves the folder beside the other checkpoints. A checkpoint without that list, or with other files, is damaged.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

from lucid_attention.files import finish_folder, read_json, write_whole

COMPLETE = "complete.json"
UNFINISHED = "unfinished"


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, newest first, whole or not."""
    folders = [
        path for path in run.glob("checkpoint-*") if path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    return sorted(folders, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The training step of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def finish_checkpoint(written: Path, checkpoint: Path) -> None:
    """Turn the folder `written` into `checkpoint`: list its files, wait until they are on disk, rename it."""
    files = {}
    for path in sorted(written.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.relative_to(written).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    write_whole(written / COMPLETE, json.dumps({"files": files}, indent=1))
    # A run that resumed before a damaged checkpoint writes that step again, and replaces it.
    finish_folder(written, checkpoint)


def find_damage(checkpoint: Path) -> str | None:
    """The damage of a checkpoint, in a sentence; None for a whole checkpoint."""
    try:
        files = read_json(checkpoint / COMPLETE)["files"]
        listed = [(checkpoint / name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()]
    except FileNotFoundError:
        return f"{checkpoint}: {COMPLETE} is missing, the checkpoint was not written to the end"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{checkpoint / COMPLETE}: cannot be read"
    for path, size, digest in listed:
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != size:
            return f"{path}: expected {size} bytes, got {path.stat().st_size}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{path}: its content has changed since it was written"
    return None


def newest_whole(run: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, or None; and the damage of each newer checkpoint."""
    damages: list[str] = []
    for checkpoint in checkpoints(run):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint, damages
        damages.append(damage)
    return None, damages


def remove_old(run: Path, keep: int, step: int) -> None:
    """Keep the newest `keep` checkpoints up to `step`, and remove all others.

    Checkpoints after `step` come from before a resume, and are damaged: the run continued from an earlier one.
    """
    kept = [checkpoint for checkpoint in checkpoints(run) if step_of(checkpoint) <= step][:keep]
    for checkpoint in checkpoints(run):
        if checkpoint in kept:
            continue
        # Remove the list first: a kill in between then leaves a checkpoint that counts as damaged.
        (checkpoint / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)
