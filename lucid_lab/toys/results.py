"""The conclusion of a claim: numbers, figures and tables as JSON. `lucid report` draws them."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

VERDICTS = ("holds", "partly", "does not hold", "incomplete", "too small to judge")

Figure = dict[str, Any]
Table = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    title: the claim in a few words. section: where the paper makes it. says: the claim in a sentence or two.
    paper: the paper's numbers, short.
    """

    title: str
    section: str
    says: str
    paper: str


@dataclass(frozen=True)
class Conclusion:
    """The outcome of a claim's run.

    ours: the numbers, short. verdict: one of VERDICTS. because: the reason for the verdict. seeds: the number of seeds.
    """

    ours: str
    verdict: str
    because: str
    seeds: int
    figures: Sequence[Figure] = field(default=())
    tables: Sequence[Table] = field(default=())

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, got {self.verdict!r}")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; as text, `99.9 ± 0.1`."""

    mean: float
    std: float
    count: int
    digits: int = 1

    def __str__(self) -> str:
        shown = f"{self.mean:.{self.digits}f}"
        return shown if self.count < 2 else f"{shown} ± {self.std:.{self.digits}f}"


def spread(values: Iterable[float], digits: int = 1) -> Spread:
    """The spread of one value or more."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("spread needs at least one value, got none")
    mean = statistics.fmean(numbers)
    # statistics.stdev refuses NaN, the loss of a diverged run.
    std = math.sqrt(sum((number - mean) ** 2 for number in numbers) / max(1, len(numbers) - 1))
    return Spread(mean, std, len(numbers), digits)


def mean_of(spreads: Sequence[Spread]) -> Spread:
    """The mean of several spreads, with their mean deviation, the largest that it can have."""
    mean, std = (statistics.fmean(values) for values in zip(*((one.mean, one.std) for one in spreads), strict=True))
    return replace(spreads[0], mean=mean, std=std)


def outcome(one: Spread, other: Spread) -> str:
    """ "ahead", "behind" or "level": whether the means differ by more than both deviations together.

    Two that read the same, such as 100.0 ± 0.0 and 100.0 ± 0.0, are level.
    """
    if abs(one.mean - other.mean) <= one.std + other.std or str(one) == str(other):
        return "level"
    return "ahead" if one.mean > other.mean else "behind"


def lead(at_equal_steps: str, at_equal_time: str) -> str:
    """The verdict on a race against softmax attention, the same for every claim. Arguments: of `outcome`.

    "holds": ahead at equal steps and at equal time. "partly": ahead at equal steps and level at equal time.
    """
    if at_equal_steps != "ahead" or at_equal_time == "behind":
        return "does not hold"
    return "holds" if at_equal_time == "ahead" else "partly"


def explain_against(name: str, ours: Spread, baselines: Mapping[str, Spread]) -> str:
    """Our score in percent, and the baselines that it is ahead of, level with and behind. baselines: by title."""
    words = {"ahead": "ahead of", "level": "within noise of", "behind": "behind"}
    sentences = []
    for key, relation in words.items():
        named = [f"{title} ({score} %)" for title, score in baselines.items() if outcome(ours, score) == key]
        if named:
            sentences.append(f"{relation} {', '.join(named)}")
    return f"{name} has {ours} %: {'; '.join(sentences)}."


def series(
    name: str, role: str, x: Sequence[float], y: Sequence[float | Spread | None], *, dashed: bool = False
) -> dict[str, Any]:
    """A line of `lines`. role: its colour. y: numbers, or spreads, whose deviations are drawn above and below."""
    means = [value.mean if isinstance(value, Spread) else value for value in y]
    deviations = [value.std for value in y if isinstance(value, Spread)]
    return {
        "name": name,
        "role": role,
        "dashed": dashed,
        "x": list(x),
        "y": finite(means),
        "spread": finite(deviations) if deviations else None,
    }


def lines(
    title: str,
    x: str,
    y: str,
    series: Sequence[Mapping[str, Any]],
    *,
    log: str = "",
    range: Sequence[float] | None = None,
    marks: Sequence[tuple[float, str]] = (),
    note: str = "",
) -> Figure:
    """Curves. x, y: labels of the axes. log: the logarithmic axes, "", "x", "y" or "xy". marks: (x, name)."""
    return {
        "kind": "lines",
        "title": title,
        "note": note,
        "x": {"label": x, "log": "x" in log},
        "y": {"label": y, "log": "y" in log, "range": None if range is None else list(range)},
        "series": [dict(line) for line in series],
        "marks": [{"x": position, "name": name} for position, name in marks],
    }


def heatmaps(
    title: str,
    rows: str,
    columns: str,
    panels: Mapping[str, tuple[Sequence[Any], Sequence[Any], Sequence[Sequence[float | None]]]],
    *,
    range: tuple[float, float],
    unit: str = "",
    signed: bool = False,
    numbers: bool = True,
    note: str = "",
) -> Figure:
    """Maps next to each other with one range of colours. panels: name → (row names, column names, values by row)."""
    return {
        "kind": "heatmaps",
        "title": title,
        "note": note,
        "rows": {"label": rows},
        "columns": {"label": columns},
        "range": list(range),
        "unit": unit,
        "signed": signed,
        "numbers": numbers,
        "panels": [
            {"name": name, "rows": list(r), "columns": list(c), "values": [finite(row) for row in values]}
            for name, (r, c, values) in panels.items()
        ],
    }


def bar(name: str, role: str, value: Spread | float) -> dict[str, Any]:
    """A bar of `bars`."""
    if isinstance(value, Spread):
        deviation = finite([value.std])[0] if value.count > 1 else None
        return {"name": name, "role": role, "value": finite([value.mean])[0], "spread": deviation}
    return {"name": name, "role": role, "value": finite([value])[0], "spread": None}


def bars(
    title: str,
    value: str,
    groups: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    range: tuple[float, float] | None = None,
    references: Mapping[str, float] | None = None,
    note: str = "",
) -> Figure:
    """Bars in groups. value: label of the axis. references: lines across all groups, such as chance."""
    return {
        "kind": "bars",
        "title": title,
        "note": note,
        "value": {"label": value, "range": None if range is None else list(range)},
        "groups": [{"name": name, "bars": [dict(bar) for bar in group]} for name, group in groups.items()],
        "references": [{"name": name, "value": height} for name, height in (references or {}).items()],
    }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, note: str = "") -> Table:
    """Cells are text, numbers, spreads or None."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    return {"title": title, "note": note, "columns": list(columns), "rows": cells}


def _cell(cell: Any) -> Any:
    if isinstance(cell, Spread):
        return str(cell)
    return finite([cell])[0] if isinstance(cell, float) else cell


def finite(values: Iterable[float | None]) -> list[float | None]:
    """The values with None for NaN and infinity, which JSON does not have."""
    return [None if value is None or not math.isfinite(value) else float(value) for value in values]
