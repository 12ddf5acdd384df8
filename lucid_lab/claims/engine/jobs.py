"""Jobs: the pieces of work of experiments, each done once.

A job is a function of `lucid_lab.claims`, and arguments that JSON can write. A store keeps its record in a
folder named by a hash of both and of the code that the function depends on. An experiment that runs again, or another
one that needs the same job, finds the record there; after an edit of that code the job runs again.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lucid_attention.files import PARTIAL, read_json, write_whole
from lucid_attention.messages import first_line

from ...fingerprint import fingerprint

# The package whose modules hold experiments and the functions of their jobs.
ROOM = __package__.rpartition(".")[0]
RECORD = "record.json"
# What safetensors calls a file that it is writing begins so.
UNFINISHED = ".tmp"
# The errors of reading a record that is not as it was written.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OSError)

Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """`function(work, **arguments) -> record`.

    function: "module:name", a module below `lucid_lab.claims`.
    arguments: everything that the record depends on, beside the code.
    label: its name in the progress. seconds: about its duration, for the time left.
    alone: nothing runs beside it, because it measures time.
    """

    function: str
    arguments: Mapping[str, Any]
    label: str = ""
    seconds: float = 10.0
    alone: bool = False

    @cached_property
    def key(self) -> str:
        """The name of its folder: equal for the same function, arguments and code."""
        identity = {"function": self.function, "arguments": self.arguments, "code": self.code}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return f"{self.function.partition(':')[2]}-{digest[:16]}"

    @property
    def code(self) -> str:
        """The fingerprint of the code that the record depends on."""
        return fingerprint(f"{ROOM}.{self.function.partition(':')[0]}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def resolve(self) -> Callable[..., Record]:
        """Import the function. Raises an error if it does not exist."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Record] = getattr(import_module(f"{ROOM}.{module}"), name)
        return function


class Store(Mapping[Job, Record]):
    """The finished jobs in a folder, as a mapping to their records. Jobs of edited code are not in it.

    damaged: the jobs whose records were found and cannot be used, with the reasons. They are not finished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.damaged: dict[Job, str] = {}
        self._read: dict[str, Record] = {}

    def folder_of(self, job: Job) -> Path:
        """The folder for the files and the record of a job."""
        return self.folder / job.key

    def entry(self, job: Job) -> dict[str, Any] | None:
        """The record of a finished job, with its duration; None if the job is not finished."""
        if job.key not in self._read:
            path = self.folder_of(job) / RECORD
            try:
                entry = _checked(path)
                if _job(entry).key != job.key:
                    raise ValueError("it is of another job")
            except FileNotFoundError:
                return None
            except DAMAGE as error:
                self.damaged[job] = f"{path} cannot be used: {first_line(error)}"
                return None
            self.damaged.pop(job, None)
            self._read[job.key] = entry
        return self._read[job.key]

    def __getitem__(self, job: Job) -> Record:
        entry = self.entry(job)
        if entry is None:
            raise KeyError(f"{job.label or job.key} is not finished in {self.folder}")
        record: Record = entry["record"]
        return record

    def __contains__(self, job: object) -> bool:
        return isinstance(job, Job) and self.entry(job) is not None

    def __iter__(self) -> Iterator[Job]:
        for path in sorted(self.folder.glob(f"*/{RECORD}")):
            try:
                job = _job(_checked(path))
            except DAMAGE:
                continue
            if job.key == path.parent.name:
                yield job

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def write(self, job: Job, record: Record, seconds: float) -> None:
        """Write a record, whole or not at all."""
        entry = {
            "job": {"function": job.function, "arguments": dict(job.arguments)},
            "code": job.code,
            "version": version("lucid-attention"),
            "torch": version("torch"),
            "seconds": round(seconds, 3),
            "record": record,
            "files": _hashes(self.folder_of(job)),
        }
        entry["sha256"] = _hash(entry)
        folder = self.folder_of(job)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RECORD, json.dumps(entry, allow_nan=False))

    def forget(self, job: Job) -> None:
        """Delete the record, then the files of the job, so that it runs again."""
        self._read.pop(job.key, None)
        self.damaged.pop(job, None)
        record = self.folder_of(job) / RECORD
        if record.is_file():
            record.unlink()
        shutil.rmtree(self.folder_of(job), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed jobs were writing. Only for the run that holds the lock of the folder."""
        for path in [*self.folder.rglob(f"*{PARTIAL}"), *self.folder.rglob(f"{UNFINISHED}*")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _checked(path: Path) -> dict[str, Any]:
    """The content of a record's file. Raises ValueError if it, or a file that its job made, is not what was written."""
    entry: dict[str, Any] = read_json(path)
    if entry.pop("sha256", None) != _hash(entry):
        raise ValueError("its content does not match its hash")
    now = _hashes(path.parent)
    for name, digest in entry["files"].items():
        if now.get(name) != digest:
            raise ValueError(f"{name} beside it {'has changed' if name in now else 'is missing'}")
    return entry


def _hash(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _hashes(folder: Path) -> dict[str, str]:
    """The hashes of the files that a job has made: later jobs read them."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / RECORD:
            with path.open("rb") as file:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _job(entry: Mapping[str, Any]) -> Job:
    return Job(entry["job"]["function"], entry["job"]["arguments"])


class Work:
    """The first argument of a job: a folder for its files, and the records and folders of earlier jobs."""

    def __init__(self, store: Store, job: Job) -> None:
        self.store = store
        self.folder = store.folder_of(job)
        self.folder.mkdir(parents=True, exist_ok=True)

    def record_of(self, job: Job) -> Record:
        """The record of a finished job."""
        return self.store[job]

    def folder_of(self, job: Job) -> Path:
        """The folder of a finished job."""
        if job not in self.store:
            raise KeyError(f"{job.label or job.key} is not finished in {self.store.folder}")
        return self.store.folder_of(job)
