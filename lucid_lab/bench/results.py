"""What a benchmark consists of, the records that it makes, and the file that keeps them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lucid_attention.files import read_json, write_record
from lucid_attention.messages import first_line

from ..devices import find_device
from ..fingerprint import fingerprint
from .harness import Spread, least_rounds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Settings:
    """The choices of the command line."""

    threads: tuple[int, ...]
    quick: bool
    device: str = "cpu"

    @property
    def torch_device(self) -> "torch.device":
        """The device, checked. "auto" is an accelerator if there is one."""
        return find_device(self.device)

    @property
    def budget(self) -> float:
        """Seconds of timing per case; more if the least number of rounds takes longer."""
        return 0.1 if self.quick else 3.0

    @property
    def least(self) -> int | None:
        """The least number of rounds; None leaves it to the harness."""
        return 3 if self.quick else None


@dataclass(frozen=True)
class Entry:
    """One contestant in one case."""

    seconds: Spread | None = None
    ratio: Spread | None = None
    megabytes: float | None = None


class Check(NamedTuple):
    value: float
    limit: float


@dataclass(frozen=True)
class Record:
    """One finished case. `facts` say what was measured. A failed check of a `strict` record fails the whole run."""

    benchmark: str
    threads: int
    facts: dict[str, int | str]
    entries: dict[str, Entry]
    checks: dict[str, Check] = field(default_factory=dict)
    flop_ratio: float | None = None
    strict: bool = False

    @property
    def verdict(self) -> str:
        if not self.checks:
            return ""
        return "ok" if all(check.value <= check.limit for check in self.checks.values()) else "over"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        def spread(value: dict[str, Any] | None) -> Spread | None:
            return None if value is None else Spread(**value)

        entries = {
            name: Entry(spread(entry["seconds"]), spread(entry["ratio"]), entry["megabytes"])
            for name, entry in data["entries"].items()
        }
        checks = {name: Check(*check) for name, check in data["checks"].items()}
        fields = {name: value for name, value in data.items() if name not in ("verdict", "code")}
        return cls(**(fields | {"entries": entries, "checks": checks}))


@dataclass(frozen=True)
class Case:
    """One measurement.

    For the estimate of its duration: `work`, floating point operations of a round; `once`, operations outside of
    rounds; `fixed`, seconds of everything else; `budget`, seconds of timing.
    """

    key: str
    label: str
    threads: int
    run: Callable[[], Record]
    work: float = 0.0
    once: float = 0.0
    fixed: float = 0.0
    budget: float = 0.0

    def estimate(self, speed: float) -> float:
        """Expected seconds. speed: operations per second of attention on one thread."""
        # Two threads do not have twice the speed.
        speed *= 0.9 * self.threads if self.threads > 1 else 1
        one_round = self.work / speed
        timing = max(self.budget, least_rounds(one_round) * one_round) if self.budget else one_round
        return timing + self.once / speed + self.fixed


class Column(NamedTuple):
    header: str
    cell: Callable[[Record], str]


@dataclass(frozen=True)
class Benchmark:
    name: str
    about: str
    """A description of the measurement, above the table."""
    limits: str
    """The limits on its results, above the table."""
    cases: Callable[[Settings], list[Case]]
    columns: tuple[Column, ...]
    page: str = "benchmarks"
    """The page that publishes its results: a name of `report.PAGES`; "" for none."""

    @property
    def code(self) -> str:
        """The fingerprint of the code that measures and is measured."""
        return fingerprint(self.cases.__module__)


class Results:
    """results.json: written after every case, so that an interrupted run loses nothing.

    Each record carries the fingerprint of its benchmark's code; a record of edited code is left out.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], benchmarks: Mapping[str, Benchmark]) -> None:
        """about: what all records must have in common. benchmarks: those whose records may be in the file."""
        self.path = folder / "results.json"
        self.about = about
        self.benchmarks = benchmarks
        self.records: dict[str, Record] = {}
        self.commands: list[dict[str, Any]] = []
        self.outdated: list[str] = []
        """Benchmarks whose records `load` left out, because their code was edited."""

    def load(self) -> str:
        """Read the records of earlier runs. Returns why new records cannot join them, or an empty string."""
        if not self.path.exists():
            return ""
        try:
            return self._take(read_json(self.path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.records, self.commands, self.outdated = {}, [], []
            return f"{self.path} is damaged ({type(error).__name__}: {first_line(error)})"

    def _take(self, data: dict[str, Any]) -> str:
        for name, value in self.about.items():
            if data["about"].get(name) != value:
                return f"{self.path} was made with another {name}: {data['about'].get(name)}, now {value}"
        outdated = set()
        for key, record in data["records"].items():
            benchmark = self.benchmarks.get(record["benchmark"])
            if benchmark is not None and record.get("code") == benchmark.code:
                self.records[key] = Record.from_json(record)
            else:
                outdated.add(record["benchmark"])
        self.outdated = sorted(outdated)
        names = {record.benchmark for record in self.records.values()}
        self.commands = [command for command in data["commands"] if names & set(command["names"])]
        return ""

    def put_aside(self) -> Path:
        """Copy the file: the next `save` writes over it."""
        return Path(shutil.copyfile(self.path, self.path.with_name("results.old.json")))

    def add_command(self, command: str, date: str, names: Sequence[str]) -> None:
        """names: the benchmarks that the command runs."""
        entry = {"command": command, "date": date, "names": list(names)}
        if entry not in self.commands:
            self.commands.append(entry)

    def add(self, key: str, record: Record) -> None:
        self.records[key] = record
        self.save()

    def save(self) -> None:
        records = {}
        for key, record in self.records.items():
            checks = {name: list(check) for name, check in record.checks.items()}
            extra = {"checks": checks, "verdict": record.verdict, "code": self.benchmarks[record.benchmark].code}
            records[key] = asdict(record) | extra
        data = {"about": self.about, "commands": self.commands, "records": records}
        write_record(self.path, data)
