"""What a case measures, the JSON file that keeps it, and docs/benchmarks.md, which is written from these files."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lucid_attention.files import read_json, write_whole

from .harness import Spread

# What was measured. The first key is the thread count; the last one, a length, becomes the columns of a table.
Sizes = dict[str, int | str]


@dataclass(frozen=True)
class Settings:
    """The choices of the command line."""

    threads: tuple[int, ...] = (1,)
    quick: bool = False
    device: str = "auto"

    @property
    def budget(self) -> float:
        """Seconds of timing per point; more if the least number of rounds takes longer."""
        return 0.1 if self.quick else 3.0

    @property
    def least(self) -> int | None:
        """The least number of rounds; None leaves it to the harness."""
        return 3 if self.quick else None


@dataclass(frozen=True)
class Result:
    """One measured point.

    seconds, megabytes: by contestant. ratios: by their names, such as "LUCID / SDPA". counted: the ratios that a count
    of operations gives; limits: the largest ratios allowed; both by the names of the ratios.
    """

    seconds: dict[str, Spread] = field(default_factory=dict)
    ratios: dict[str, Spread] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    megabytes: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> list[str]:
        """The ratios above their limits."""
        return [name for name, limit in self.limits.items() if self.ratios[name].median > limit]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Result":
        seconds, ratios = ({name: Spread(*x) for name, x in data[what].items()} for what in ("seconds", "ratios"))
        return cls(seconds, ratios, data["counted"], data["limits"], data["megabytes"])


class Point(NamedTuple):
    sizes: Sizes
    run: Callable[[], Result]


class Case(NamedTuple):
    """A case of `lucid bench`. about: what is measured, against what, with which limits."""

    name: str
    about: str
    points: Callable[[Settings], list[Point]]


class CaseFile:
    """The records of one case in FOLDER/CASE.json, written after every point: an interrupt loses nothing."""

    def __init__(self, folder: Path, case: str, made: Mapping[str, Any]) -> None:
        """made: how the records are made: machine, commit, quick; also date and command, which may differ."""
        self.path, self.case, self.made = folder / f"{case}.json", case, dict(made)
        self.records: list[tuple[Sizes, Result]] = []

    def resume(self) -> None:
        """Take over the records of an earlier run, which must have been made in the same way."""
        if not self.path.exists():
            return
        data, records = read_case(self.path)
        for name in ("machine", "commit", "quick"):
            if data[name] != self.made[name]:
                raise ValueError(
                    f"--resume needs records of the same {name}: expected {self.made[name]}, got {data[name]} in "
                    f"{self.path}. Leave out --resume, or choose another --out"
                )
        self.records = records

    def add(self, sizes: Sizes, result: Result) -> None:
        self.records.append((sizes, result))
        head = json.dumps({"case": self.case, **self.made}, indent=1, ensure_ascii=False)
        lines = (json.dumps({"sizes": sizes, **asdict(result)}, ensure_ascii=False) for sizes, result in self.records)
        write_whole(self.path, head.removesuffix("\n}") + ',\n "records": [\n' + ",\n".join(lines) + "\n]}\n")


def read_case(path: Path) -> tuple[dict[str, Any], list[tuple[Sizes, Result]]]:
    """The head of a case's file, and its records."""
    data = read_json(path)
    try:
        records = [(record.pop("sizes"), Result.from_json(record)) for record in data.pop("records")]
        data["machine"], data["commit"], data["quick"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a file of `lucid bench`, got {type(error).__name__}: {error}") from error
    return data, records


def number(x: float) -> str:
    """Three significant digits, without an exponent; three decimals for ratios near 1."""
    if abs(x - 1) < 0.1 or abs(x) < 1:
        return f"{x:.3f}"
    return f"{x:.{0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2}f}"


def spread_text(spread: Spread) -> str:
    if spread.rounds == 1:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)}–{number(spread.high)})"


def table(records: Iterable[tuple[Sizes, Result]]) -> list[list[str]]:
    """Medians of all ratios, and megabytes: the first row is the heading, the last size gives the columns.

    Ratios above their limit are in bold.
    """
    records = list(records)
    *fixed, axis = records[0][0]
    columns = sorted({sizes[axis] for sizes, _ in records}, key=lambda size: (isinstance(size, str), size))
    rows: dict[tuple[str, ...], dict[int | str, str]] = {}
    counted: dict[tuple[str, ...], list[float]] = {}
    limits: dict[tuple[str, ...], list[float]] = {}
    for sizes, result in records:
        values = {name: number(spread.median) for name, spread in result.ratios.items()}
        values |= {name: f"**{values[name]}**" for name in result.over}
        values |= {f"{name}, MB": number(size) for name, size in result.megabytes.items()}
        for name, value in values.items():
            row = (*(str(sizes[key]) for key in fixed), name)
            rows.setdefault(row, {})[sizes[axis]] = value
            for kept, given in ((counted, result.counted), (limits, result.limits)):
                kept.setdefault(row, []).extend([given[name]] if name in given else [])
    heading = [*fixed, "", "counted", "limit", *(f"{axis} {columns[0]}", *map(str, columns[1:]))]
    return [heading] + [
        [*row, _range(counted[row]), _range(limits[row]), *(cells.get(column, "") for column in columns)]
        for row, cells in rows.items()
    ]


def _range(values: Sequence[float]) -> str:
    if not values or values[0] == values[-1]:
        return number(values[0]) if values else ""
    return f"{number(values[0])}–{number(values[-1])}"


INTRODUCTION = """\
# Benchmarks

Written by `lucid bench --publish` from the files in `records/bench`, which also have the times and quartiles of every \
number. Every ratio comes from a comparison within one run: contestants take turns, in a new order each round; a cell \
is the median of the ratios round by round. Before anything is timed, every contestant has to agree with the defining \
equation in float64, on correlated keys. "counted" is the ratio by a count of operations; ratios above their limit are \
in **bold**. A row with several records is shown from the newest. [costs.md](costs.md) is the summary."""


def page(folder: Path, cases: Iterable[Case]) -> str:
    """docs/benchmarks.md from FOLDER/MACHINE/CASE.json."""
    parts = [INTRODUCTION]
    for case in cases:
        tables: list[str] = []
        shown: set[tuple[str, ...]] = set()
        files = [read_case(path) for path in sorted(folder.glob(f"*/{case.name}.json"))]
        for data, records in sorted(files, key=lambda file: (file[0]["date"], file[0]["machine"]["CPU"]), reverse=True):
            heading, *rows = table(records)
            # What a row measures: its cells up to the name of the ratio.
            end = heading.index("")
            rows = [row for row in rows if tuple(row[: end + 1]) not in shown]
            shown |= {tuple(row[: end + 1]) for row in rows}
            lines = ["|".join(("", *row, "")) for row in (heading, ["---"] * len(heading), *rows)]
            tables += [f"{_made(data)}\n\n" + "\n".join(lines)] if rows else []
        parts += [f"## {case.name}", case.about, *tables] if tables else []
    return "\n\n".join(parts) + "\n"


def _made(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "Numba") if name in machine)
    note = f" {data['note']}" if data.get("note") else ""
    return (
        f"**{machine['CPU']}**, {machine['cores']} cores, {machine['memory']}, {versions}; `{data['command']}`, "
        f"{data['date']}, lucid-attention {machine['lucid_attention']} ({data['commit'] or 'no checkout'}).{note}"
    )
