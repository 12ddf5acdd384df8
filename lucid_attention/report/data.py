"""The numbers of a figure as tables."""

import math
from typing import Any

from .bars import bar_places
from .numbers import shown, with_spread

# A map of more cells is shown as plain text: thousands of table cells make a page slow.
MOST_CELLS = 400


def tables_of(figure: dict[str, Any], most_rows: int) -> list[dict[str, Any]]:
    """Tables of a figure: title, note, columns, rows; for large maps `text` in place of columns and rows."""
    make = {"lines": _of_lines, "bars": _of_bars, "heatmaps": _of_panels}
    return make[figure["kind"]](figure, most_rows)


def _of_lines(figure: dict[str, Any], most_rows: int) -> list[dict[str, Any]]:
    series = figure["series"]
    points = sorted({x for each in series for x in each["x"] if x is not None})
    step = max(1, math.ceil(len(points) / most_rows))
    # The last point is the one that people look for.
    kept = sorted(points[::-1][::step])
    found: list[dict[Any, str]] = []
    for each in series:
        spread = each.get("spread") or [None] * len(each["x"])
        cells = zip(each["x"], each["y"], spread, strict=True)
        found.append({x: with_spread(y, by) for x, y, by in cells})
    rows = [[x, *(column.get(x) for column in found)] for x in kept]
    note = f"Every {_ordinal(step)} of {len(points)} points." if step > 1 else ""
    columns = [figure["x"].get("label") or "x", *(each["name"] for each in series)]
    return [{"title": figure["y"].get("label") or "", "note": note, "columns": columns, "rows": rows}]


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
    found: list[dict[str, Any]] = []
    for panel in figure["panels"]:
        title = f"{panel.get('name', '')}{unit}"
        if len(panel["rows"]) * len(panel["columns"]) > MOST_CELLS:
            lines = [",".join("" if value is None else f"{value:.3g}" for value in row) for row in panel["values"]]
            note = f"{len(panel['rows'])} rows of {len(panel['columns'])}, comma-separated."
            found.append({"title": title, "note": note, "text": "\n".join(lines)})
            continue
        rows = [[shown(name), *values] for name, values in zip(panel["rows"], panel["values"], strict=True)]
        columns = [corner, *(shown(name) for name in panel["columns"])]
        found.append({"title": title, "note": "", "columns": columns, "rows": rows})
    return found


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
