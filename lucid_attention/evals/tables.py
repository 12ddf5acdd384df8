"""Results on the screen."""

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns; the first is a heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def scaled(cell: dict[str, Any], value: float | None, digits: int = 1) -> str:
    """A score in per cent of the best one; as it is where there is no best."""
    if value is None:
        return "?"
    return f"{100 * value / cell['out_of']:.{digits}f}" if cell["out_of"] else f"{value:.4f}"


def unit(cell: dict[str, Any]) -> str:
    """The metric of a cell and its scale."""
    return f"{cell['metric']}, %" if cell["out_of"] else f"{cell['metric']} (less is better)"


def with_error(cell: dict[str, Any]) -> str:
    """A score and its standard error."""
    return f"{scaled(cell, cell['mean'])} ± {scaled(cell, cell['standard_error'])}"


def results_table(cells: Sequence[dict[str, Any]]) -> str:
    """Scores and their standard errors, a table for each family and metric: a grid where cells have two labels."""
    tables = []
    for family, metric in dict.fromkeys((cell["family"], unit(cell)) for cell in cells):
        ours = [cell for cell in cells if (cell["family"], unit(cell)) == (family, metric)]
        samples = "/".join(map(str, sorted({cell["samples"] for cell in ours})))
        rows = _grid(ours) if len(ours[0]["labels"]) == 2 else _list(ours)
        tables.append(f"{family}: {metric} ± standard error, {samples} samples a cell\n{table(rows)}")
    return "\n\n".join(tables)


def _list(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = [[*cells[0]["labels"], "score"]]
    return rows + [[*map(str, cell["labels"].values()), with_error(cell)] for cell in cells]


def _grid(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """First label down, second across, and the mean of every column below it."""
    down, across = cells[0]["labels"]
    by_place = {tuple(cell["labels"].values()): cell for cell in cells}
    heads, sides = (list(dict.fromkeys(place[axis] for place in by_place)) for axis in (1, 0))
    rows = [[down, *(f"{across} {head}" for head in heads)]]
    for side in sides:
        found = [by_place.get((side, head)) for head in heads]
        rows.append([str(side), *(with_error(cell) if cell else "" for cell in found)])
    if len(sides) > 1:
        columns = [[cell for place, cell in by_place.items() if place[1] == head] for head in heads]
        rows.append(["mean", *(scaled(cells[0], sum(cell["mean"] for cell in each) / len(each)) for each in columns)])
    return rows
