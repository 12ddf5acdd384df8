"""Jobs: the pieces of work of experiments, each done once.

A job is a function of `lucid_attention.experiments`, and arguments that JSON can write. A store keeps its record in a
folder named by a hash of both and of the code that the function depends on. An experiment that runs again, or another
one that needs the same job, finds the record there; after an edit of that code the job runs again.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...base.files import write_whole
from ...base.fingerprint import fingerprint

# The package whose modules hold experiments and the functions of their jobs.
ROOM = __package__.rpartition(".")[0]
RECORD = "record.json"

Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Job:
    """`function(work, **arguments) -> record`.

    function: "module:name", a module below `lucid_attention.experiments`.
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
    """The finished jobs in a folder, as a mapping to their records. Jobs of edited code are not in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._read: dict[str, Record] = {}

    def folder_of(self, job: Job) -> Path:
        """The folder for the files and the record of a job."""
        return self.folder / job.key

    def entry(self, job: Job) -> dict[str, Any] | None:
        """The record of a finished job, with its duration; None if the job is not finished."""
        if job.key not in self._read:
            try:
                self._read[job.key] = json.loads((self.folder_of(job) / RECORD).read_text())
            except (FileNotFoundError, json.JSONDecodeError):
                return None
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
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(path.read_text())["job"]
                job = Job(entry["function"], entry["arguments"])
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
        }
        folder = self.folder_of(job)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RECORD, json.dumps(entry, allow_nan=False))

    def forget(self, job: Job) -> None:
        """Delete the record, so that the job runs again."""
        self._read.pop(job.key, None)
        (self.folder_of(job) / RECORD).unlink(missing_ok=True)


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
