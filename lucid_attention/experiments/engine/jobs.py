"""Jobs: the pieces of work of experiments, known by what they compute, kept once they are done.

A job is a function of this room and arguments that JSON can write. Its record stands in a store, in a folder named by a
hash of both, so an experiment that is run again, or another one that needs the same piece, finds it.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...base.files import write_whole

# The package whose modules hold experiments and the functions of their jobs.
ROOM = __package__.rpartition(".")[0]
RECORD = "record.json"

Record = dict[str, Any]


@cache
def package_version() -> str:
    """Of this package. It is read from a file, and asked for with every job."""
    return version("lucid-attention")


@dataclass(frozen=True, eq=False)
class Job:
    """`function(work, **arguments) -> record`.

    function: "module:name", a module below `lucid_attention.experiments`.
    arguments: everything that the record depends on.
    label: what progress calls it. seconds: about how long it takes, for the time left.
    alone: nothing else runs meanwhile, because it measures time.
    """

    function: str
    arguments: Mapping[str, Any]
    label: str = ""
    seconds: float = 10.0
    alone: bool = False

    @cached_property
    def key(self) -> str:
        """The name of its folder: equal for equal work."""
        identity = {"function": self.function, "arguments": self.arguments, "version": package_version()}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return f"{self.function.partition(':')[2]}-{digest[:16]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def resolve(self) -> Callable[..., Record]:
        """The function. An unknown one is an error here, before anything runs."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Record] = getattr(import_module(f"{ROOM}.{module}"), name)
        return function


class Store(Mapping[Job, Record]):
    """The finished jobs in a folder, as a mapping to their records."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._read: dict[str, Record] = {}

    def folder_of(self, job: Job) -> Path:
        """Where a job keeps what it makes."""
        return self.folder / job.key

    def entry(self, job: Job) -> dict[str, Any] | None:
        """What is written of a finished job: its record, and how long it took. None if it is not finished."""
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
                written = json.loads(path.read_text())["job"]
                yield Job(written["function"], written["arguments"])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def write(self, job: Job, record: Record, seconds: float) -> None:
        """Keep a record, whole or not at all."""
        entry = {
            "job": {"function": job.function, "arguments": dict(job.arguments)},
            "version": package_version(),
            "torch": version("torch"),
            "seconds": round(seconds, 3),
            "record": record,
        }
        folder = self.folder_of(job)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RECORD, json.dumps(entry, allow_nan=False))

    def forget(self, job: Job) -> None:
        """Let a job be done again."""
        self._read.pop(job.key, None)
        (self.folder_of(job) / RECORD).unlink(missing_ok=True)


class Work:
    """What a job is given: a folder for what it makes, and what earlier jobs made."""

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
