"""What a benchmark is made of, what it leaves behind, and the file that keeps it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .harness import Spread, least_rounds

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    threads: tuple[int, ...]
    quick: bool

    @property
    def budget(self) -> float:
        """Seconds of timing per case, unless its calls are too long for that."""
        return 0.1 if self.quick else 3.0

    @property
    def least(self) -> int | None:
        """Least rounds; None: the harness decides."""
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
    """One finished case. `facts` say what was measured; a failed check of a `strict` record fails the whole run."""

    benchmark: str
    threads: int
    facts: dict[str, int | str]
    entries: dict[str, Entry]
    checks: dict[str, Check] = field(default_factory=dict)
    bound: float | None = None
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
        known = {name: value for name, value in data.items() if name != "verdict"}
        return cls(**(known | {"entries": entries, "checks": checks}))


@dataclass(frozen=True)
class Case:
    """One measurement. `work`: floating point operations of a round; `once`: of what is done once, `fixed`: seconds."""

    key: str
    label: str
    threads: int
    run: Callable[[], Record]
    work: float = 0.0
    once: float = 0.0
    fixed: float = 0.0
    budget: float = 0.0

    def estimate(self, speed: float) -> float:
        """Expected seconds, where one thread does `speed` operations per second in attention."""
        # A second thread does not bring twice the speed.
        speed *= 0.9 * self.threads if self.threads > 1 else 1
        turn = self.work / speed
        timing = max(self.budget, least_rounds(turn) * turn) if self.budget else turn
        return timing + self.once / speed + self.fixed


class Column(NamedTuple):
    header: str
    cell: Callable[[Record], str]


@dataclass(frozen=True)
class Benchmark:
    name: str
    about: str
    """What it measures, for --help and above the table."""
    limits: str
    """What is asked for, above the table."""
    minutes: str
    """How long it takes on two cores, for --help."""
    cases: Callable[[Settings], list[Case]]
    columns: tuple[Column, ...]
    page: str = "benchmarks"
    """On which page its results are published, a name of `report.PAGES`."""


def fingerprint() -> str:
    """Of the code that was measured and that measured: results of two versions do not belong into one table."""
    digest = hashlib.sha256()
    for folder in ("lucid_attention", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Store:
    """results.json: written after every case, so that an interrupted run loses nothing."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """about: what all results must have in common."""
        self.path = folder / "results.json"
        self.about = about
        self.records: dict[str, Record] = {}
        self.commands: list[dict[str, Any]] = []

    def load(self) -> str:
        """Take over what earlier runs finished; what speaks against it, or nothing."""
        if not self.path.exists():
            return ""
        data = json.loads(self.path.read_text())
        for name, value in self.about.items():
            if data["about"].get(name) != value:
                return f"{self.path} was made with another {name}: {data['about'].get(name)}, now {value}"
        self.records = {key: Record.from_json(record) for key, record in data["records"].items()}
        self.commands = data["commands"]
        return ""

    def put_aside(self) -> Path:
        """Keep results that do not belong to ours under another name."""
        return self.path.replace(self.path.with_name("results.old.json"))

    def add_command(self, command: str, date: str, names: Sequence[str]) -> None:
        """names: of the benchmarks that it runs."""
        entry = {"command": command, "date": date, "names": list(names)}
        if entry not in self.commands:
            self.commands.append(entry)

    def add(self, key: str, record: Record) -> None:
        self.records[key] = record
        self.save()

    def save(self) -> None:
        records = {key: asdict(record) | {"verdict": record.verdict} for key, record in self.records.items()}
        for record in records.values():
            record["checks"] = {name: list(check) for name, check in record["checks"].items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"about": self.about, "commands": self.commands, "records": records}
        new = self.path.with_suffix(".tmp")
        new.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        new.replace(self.path)
