"""Tables, pages in Markdown and pictures, made from records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .harness import Spread
from .results import Benchmark, Record, Results

PICTURE, LINEAR_PICTURE = "cost_growth.png", "linear_growth.png"
Cell = Callable[[Record], str]


class Page(NamedTuple):
    """A page of docs/ for results, with at most one picture."""

    file: str
    title: str
    benchmark: str = ""
    """The benchmark that the picture shows."""
    picture: str = ""
    caption: str = ""


PAGES = {
    "benchmarks": Page("benchmarks.md", "Benchmarks", "growth", PICTURE, "Time and peak memory against length"),
    "family": Page(
        "benchmarks_family.md",
        "Benchmarks of the family",
        "linear",
        LINEAR_PICTURE,
        "Time against length for the members with a state of fixed size",
    ),
    "models": Page("benchmarks_models.md", "Benchmarks of whole models"),
}


def number(x: float) -> str:
    """Three significant digits, without an exponent."""
    if x == 0:
        return "0"
    for limit, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(x) >= limit:
            return f"{x:.{digits}f}"
    return f"{x:.3f}"


def _spread(spread: Spread | None, factor: float = 1.0) -> str:
    if spread is None:
        return ""
    if spread.rounds == 1:
        return number(spread.median * factor)
    return f"{number(spread.median * factor)} ({number(spread.low * factor)}–{number(spread.high * factor)})"


def fact(name: str) -> Cell:
    return lambda record: str(record.facts[name])


def milliseconds(name: str) -> Cell:
    return lambda record: _spread(record.entries[name].seconds, 1e3) if name in record.entries else ""


def seconds(name: str) -> Cell:
    return lambda record: _spread(record.entries[name].seconds) if name in record.entries else ""


def ratio(name: str) -> Cell:
    return lambda record: _spread(record.entries[name].ratio) if name in record.entries else ""


def megabytes(name: str) -> Cell:
    def cell(record: Record) -> str:
        value = record.entries[name].megabytes if name in record.entries else None
        return "" if value is None else number(value)

    return cell


def entry_ratio(name: str, to: str) -> Cell:
    """The ratio of two contestants' medians: of memory if it was measured, else of time."""

    def cell(record: Record) -> str:
        if name not in record.entries or to not in record.entries:
            return ""
        a, b = record.entries[name], record.entries[to]
        if a.megabytes is not None and b.megabytes is not None:
            return f"{a.megabytes / b.megabytes:.2f}"
        assert a.seconds is not None
        assert b.seconds is not None
        return f"{a.seconds.median / b.seconds.median:.2f}"

    return cell


def flop_ratio(record: Record) -> str:
    return "" if record.flop_ratio is None else f"{record.flop_ratio:.3f}"


def limit(name: str) -> Cell:
    return lambda record: f"{record.checks[name].limit:.3f}" if name in record.checks else ""


def verdict(record: Record) -> str:
    return record.verdict


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def brief(record: Record) -> str:
    """The result in one line, for the progress of a run."""
    if record.checks:
        parts = [f"{name} {check.value:.3f} (limit {check.limit:.3f})" for name, check in record.checks.items()]
        return f"{', '.join(parts)} {record.verdict}"
    parts = []
    for name, entry in record.entries.items():
        if entry.ratio is not None and entry.ratio.median != 1:
            parts.append(f"{name} {entry.ratio.median:.2f}")
        elif entry.ratio is None and entry.megabytes is not None:
            parts.append(f"{name} {number(entry.megabytes)} MB")
    return ", ".join(parts)


def cells(benchmark: Benchmark, records: Iterable[Record]) -> list[list[str]]:
    """The table of a benchmark, its first row the headers."""
    headers = [column.header for column in benchmark.columns]
    return [headers, *([column.cell(record) for column in benchmark.columns] for record in records)]


def table(benchmark: Benchmark, records: Sequence[Record]) -> list[str]:
    headers, *rows = cells(benchmark, records)
    return [f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows)]


INTRODUCTION = (
    "Every number comes from a comparison within one run: contestants take turns, in a new order each round. A cell is "
    "a median over rounds, with the quartiles in parentheses. Ratios are taken round by round. Before anything is timed"
    ", every contestant has to agree with the defining equation in float64, on correlated keys."
)


def sections(benchmarks: Iterable[Benchmark], results: Results) -> list[str]:
    lines: list[str] = []
    for benchmark in benchmarks:
        records = [record for record in results.records.values() if record.benchmark == benchmark.name]
        if not records:
            continue
        lines += ["", f"## {benchmark.name}", "", benchmark.about]
        lines += ["", benchmark.limits] if benchmark.limits else []
        for threads in sorted({record.threads for record in records}):
            thread_records = [record for record in records if record.threads == threads]
            lines += ["", f"### {benchmark.name}, {count(threads, 'thread')}", "", *table(benchmark, thread_records)]
    return lines


def document(title: str, benchmarks: Sequence[Benchmark], results: Results, pictures: Mapping[str, str]) -> str:
    """The page of a run. pictures: captions by path, relative to the page."""
    names = {benchmark.name for benchmark in benchmarks}
    judged = [record for record in results.records.values() if record.verdict and record.benchmark in names]
    over = sum(record.verdict == "over" for record in judged)
    lines = [
        f"# {title}",
        "",
        INTRODUCTION,
        "",
        "A quick run: its sizes are too small to judge the limits."
        if results.about["quick"]
        else f"{over} of {len(judged)} cases that have a limit are over it.",
        "",
        "| made with | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in results.about["machine"].items()),
        *(
            f"| command, {command['date']} | `{command['command']}` |"
            for command in results.commands
            if names & set(command["names"])
        ),
    ]
    for where, caption in pictures.items():
        lines += ["", f"![{caption}]({where})"]
    return "\n".join([*lines, *sections(benchmarks, results)]) + "\n"


# The points of one contestant: lengths, and seconds or megabytes.
Line = list[tuple[int, float]]


class Panel(NamedTuple):
    title: str
    unit: str
    lines: dict[str, Line]


def plot_growth(records: Sequence[Record], path: Path) -> None:
    """Time and peak memory against the length."""
    colours = {"SDPA": "#666666", "lucid_attention": "#1f5fa8", "dense solve": "#c4622d"}
    sizes: dict[str, Line] = {}
    for name in colours:
        entries = [(int(record.facts["N"]), record.entries[name]) for record in records if name in record.entries]
        sizes[name] = [(N, entry.megabytes) for N, entry in entries if entry.megabytes is not None]
    time = Panel("Time, forward + backward", "seconds", _times(records, colours))
    _draw((time, Panel("Peak memory over inputs", "MB", sizes)), colours, records[0], path)


def plot_linear(records: Sequence[Record], path: Path) -> None:
    """Time against the length, forward and forward+backward."""
    colours = {"SDPA": "#666666", "delta": "#1f5fa8", "gated_delta": "#c4622d", "gla": "#2e8b57", "gsa": "#8456a8"}
    panels = []
    for what, title in (("forward", "Time, forward"), ("forward+backward", "Time, forward + backward")):
        chosen = [record for record in records if record.facts["pass"] == what]
        panels.append(Panel(title, "seconds", _times(chosen, colours)))
    _draw(panels, colours, records[0], path)


def _times(records: Sequence[Record], names: Iterable[str]) -> dict[str, Line]:
    lines: dict[str, Line] = {name: [] for name in names}
    for record in sorted(records, key=lambda record: int(record.facts["N"])):
        for name, line in lines.items():
            seconds = record.entries[name].seconds if name in record.entries else None
            if seconds is not None:
                line.append((int(record.facts["N"]), seconds.median))
    return lines


def _draw(panels: Sequence[Panel], colours: Mapping[str, str], example: Record, path: Path) -> None:
    """Panels side by side, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (row,) = plt.subplots(1, len(panels), figsize=(9, 3.8), layout="constrained", squeeze=False)
    for axes, panel in zip(row, panels, strict=True):
        for name, line in panel.lines.items():
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", markersize=4, color=colours[name], label=name)
        lengths = sorted({N for line in panel.lines.values() for N, _ in line})
        axes.set(title=panel.title, xlabel="sequence length", ylabel=panel.unit, yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{N // 1024}K" if N >= 1024 else str(N) for N in lengths])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    row[0].legend(frameon=False)
    facts, threads = example.facts, count(example.threads, "thread")
    figure.suptitle(f"float32, D = {facts['D']}, {facts['heads']}/{facts['kv_heads']} heads, {threads}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
