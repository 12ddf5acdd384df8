"""Published pages, with the tables of several machines side by side.

A page is its own memory: publishing reads it, replaces what this machine measured anew, and keeps everything else. The
heading of a table says its benchmark and thread count, the heading below that its machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .report import INTRODUCTION, Page, count, table
from .results import Benchmark, Record, Results

MACHINES = "Machines"
Rows = dict[str, str]


@dataclass
class Published:
    """What a page holds."""

    machines: dict[str, Rows] = field(default_factory=dict)
    """By label: what its tables were made with."""
    tables: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """By heading ("solve, 1 thread") and label: the lines of a table."""
    picture: str = ""

    @classmethod
    def of(cls, text: str) -> "Published":
        """Read a page that `render` wrote."""
        page, part, heading, label = cls(), "", "", ""
        for line in text.splitlines():
            if line.startswith("## "):
                part, heading, label = line[3:], "", ""
            elif line.startswith("### "):
                heading, label = line[4:], ""
            elif line.startswith("#### "):
                label = line[5:]
            elif line.startswith("!["):
                page.picture = line
            elif line.startswith("| ") and part == MACHINES:
                name, value = (cell.strip() for cell in line.strip("|").split("|", 1))
                if name not in ("made with", "---", "limits"):
                    page.machines.setdefault(heading, {})[name] = value
            elif line.startswith("| ") and label:
                page.tables.setdefault((heading, label), []).append(line)
        return page

    def add(self, benchmarks: Iterable[Benchmark], results: Results) -> None:
        """Take in the tables of this machine."""
        about, names = results.about["machine"], {benchmark.name for benchmark in benchmarks}
        label = machine_label(about)
        commands = {name: value for name, value in self.machines.get(label, {}).items() if name.startswith("command")}
        for command in results.commands:
            if names & set(command["names"]):
                commands[f"command, {command['date']}: {', '.join(command['names'])}"] = f"`{command['command']}`"
        self.machines[label] = dict(about) | commands
        for benchmark in benchmarks:
            for threads, records in _by_threads(benchmark, results.records.values()).items():
                self.tables[f"{benchmark.name}, {count(threads, 'thread')}", label] = table(benchmark, records)

    def render(self, title: str, benchmarks: Sequence[Benchmark], see: Sequence[Page], quick: bool = False) -> str:
        lines = [f"# {title}", "", INTRODUCTION, ""]
        lines += [line for page in see for line in (f"See also [{page.title}]({page.file}).", "")]
        lines += ["A quick run: its sizes are too small to judge the limits.", ""] if quick else []
        lines += [f"## {MACHINES}"]
        for label, rows in self.machines.items():
            lines += ["", f"### {label}", "", "| made with | |", "| --- | --- |"]
            lines += [f"| {name} | {value} |" for name, value in (rows | {"limits": self._limits(label)}).items()]
        lines += ["", self.picture] if self.picture else []
        for benchmark in benchmarks:
            headings = sorted({heading for heading, _ in self.tables if heading.startswith(f"{benchmark.name}, ")})
            if headings:
                lines += ["", f"## {benchmark.name}", "", benchmark.about]
                lines += ["", benchmark.limits] if benchmark.limits else []
            for heading in headings:
                lines += ["", f"### {heading}"]
                for label in self.machines:
                    if (heading, label) in self.tables:
                        lines += ["", f"#### {label}", "", *self.tables[heading, label]]
        return "\n".join(lines) + "\n"

    def _limits(self, label: str) -> str:
        cells = [
            cell.strip()
            for (_, machine), lines in self.tables.items()
            if machine == label
            for line in lines
            for cell in line.split("|")
        ]
        over = cells.count("over")
        return f"{over} of {over + cells.count('ok')} cases that have a limit are over it"


def machine_label(about: Rows) -> str:
    """A short name: the CPU, and the widest instructions that torch uses on it."""
    return f"{about['CPU']}, {about['torch'].rpartition(', ')[2]}"


def _by_threads(benchmark: Benchmark, records: Iterable[Record]) -> dict[int, list[Record]]:
    chosen = [record for record in records if record.benchmark == benchmark.name]
    return {
        threads: [record for record in chosen if record.threads == threads]
        for threads in sorted({record.threads for record in chosen})
    }
