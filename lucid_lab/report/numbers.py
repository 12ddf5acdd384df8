"""Numbers as people read them, and the numbers of a figure as tables."""

import math
import re
from collections.abc import Iterable
from typing import Any

SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
MISSING = "–"
# A map of more cells becomes plain text: thousands of table cells make a page slow.
MOST_CELLS = 400


def typeset(text: str) -> str:
    """Minus signs for hyphens before numbers; no line break between a number and its spread or percent sign."""
    text = re.sub(r"(?<![^\s(\[,;:/→])-(?=\d)", "−", text)
    return text.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def shown(value: Any) -> str:
    """The text of a cell: text unchanged, numbers with four digits, a dash for None."""
    if value is None:
        return MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return str(value).replace("-", "−")
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        text = f"{mantissa}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    elif size >= 1000:
        text = f"{value:.0f}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−")


def with_spread(value: Any, spread: Any, places: int | None = None) -> str:
    """`99.9 ± 0.1`, or the value alone. places: after the point; None for two digits of the spread."""
    if value is None:
        return MISSING
    if places is None:
        if not spread or not 1e-4 <= spread < 1e4:
            return shown(value) if spread is None else f"{shown(value)} ± {shown(spread)}"
        places = max(0, 1 - math.floor(math.log10(spread)))
    text = f"{value:.{places}f}" if spread is None else f"{value:.{places}f} ± {spread:.{places}f}"
    return text.replace("-", "−")


def places_of(values: Iterable[Any]) -> int:
    """Places after the point for numbers of one figure: as in 99.9, 1.25, 0.0123; none for whole numbers."""
    sizes = [abs(value) for value in values if value is not None]
    largest = max(sizes, default=0.0)
    if largest >= 1000 or all(float(size).is_integer() for size in sizes):
        return 0
    return max(1, 2 - math.floor(math.log10(largest)))


def tick(value: float) -> str:
    """The label of a tick of a logarithmic axis: 0.01, 500, 2K for 2048, 10⁶."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        thousands = int(value) // 1024
        return f"{thousands}K" if thousands < 1024 or thousands % 1024 else f"{thousands // 1024}M"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def duration(seconds: Any) -> str:
    """`43 s`, `5 min 12 s`, `2 h 3 min`."""
    if not isinstance(seconds, (int, float)):
        return MISSING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def bar_places(figure: dict[str, Any]) -> int:
    """Places after the point, the same for all numbers of a `bars` figure."""
    values = [bar.get("value") for group in figure["groups"] for bar in group["bars"]]
    return places_of([*values, *(figure["value"].get("range") or [])])


def tables_of(figure: dict[str, Any], most_rows: int) -> list[dict[str, Any]]:
    """The tables of a figure: {"title", "note", "columns", "rows"}; large maps have "text" instead of the last two."""
    make = {"lines": _of_lines, "bars": _of_bars, "heatmaps": _of_panels}
    return make[figure["kind"]](figure, most_rows)


def _of_lines(figure: dict[str, Any], most_rows: int) -> list[dict[str, Any]]:
    series = figure["series"]
    points = sorted({x for line in series for x in line["x"] if x is not None})
    step = max(1, math.ceil(len(points) / most_rows))
    # Counted from the end, so that the last point is kept.
    kept = sorted(points[::-1][::step])
    columns: list[dict[Any, str]] = []
    for line in series:
        spread = line.get("spread") or [None] * len(line["x"])
        cells = zip(line["x"], line["y"], spread, strict=True)
        columns.append({x: with_spread(y, by) for x, y, by in cells})
    rows = [[x, *(column.get(x) for column in columns)] for x in kept]
    note = f"Every {_ordinal(step)} of {len(points)} points." if step > 1 else ""
    names = [figure["x"].get("label") or "x", *(line["name"] for line in series)]
    return [{"title": figure["y"].get("label") or "", "note": note, "columns": names, "rows": rows}]


def _of_bars(figure: dict[str, Any], most_rows: int) -> list[dict[str, Any]]:
    groups = figure["groups"]
    names = list(dict.fromkeys(bar["name"] for group in groups for bar in group["bars"]))
    places = bar_places(figure)
    cells = [
        {bar["name"]: with_spread(bar.get("value"), bar.get("spread"), places) for bar in group["bars"]}
        for group in groups
    ]
    rows: list[list[Any]] = [[name, *(column.get(name) for column in cells)] for name in names]
    for reference in figure.get("references") or []:
        rows.append([f"{reference.get('name', '')} (line)", *([reference.get("value")] * len(groups))])
    columns = ["", *(str(group.get("name", "")) for group in groups)]
    return [{"title": figure["value"].get("label") or "", "note": "", "columns": columns, "rows": rows}]


def _of_panels(figure: dict[str, Any], most_rows: int) -> list[dict[str, Any]]:
    corner = f"{figure['rows'].get('label', '')} ↓ {figure['columns'].get('label', '')} →"
    unit = f", {figure['unit']}" if figure.get("unit") else ""
    tables: list[dict[str, Any]] = []
    for panel in figure["panels"]:
        title = f"{panel.get('name', '')}{unit}"
        if len(panel["rows"]) * len(panel["columns"]) > MOST_CELLS:
            lines = [",".join("" if value is None else f"{value:.3g}" for value in row) for row in panel["values"]]
            note = f"{len(panel['rows'])} rows of {len(panel['columns'])}, comma-separated."
            tables.append({"title": title, "note": note, "text": "\n".join(lines)})
            continue
        rows = [[shown(name), *values] for name, values in zip(panel["rows"], panel["values"], strict=True)]
        columns = [corner, *(shown(name) for name in panel["columns"])]
        tables.append({"title": title, "note": "", "columns": columns, "rows": rows})
    return tables


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
