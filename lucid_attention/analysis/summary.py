"""The numbers of an analysis on the screen: a line for every layer."""

from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

from .hit_rate import MEASURES

Record = dict[str, Any]


def summary(head: Record, found: dict[str, Any]) -> str:
    """A table for every analysis. head: what the numbers are of."""
    about, shown = head["checkpoint"], head["input"]
    size = f"{shown['tokens']} tokens: " if "tokens" in shown else ""
    parts = [f"{about['name']} ({about['model_type']}, {about['attention']}), {size}{shown['about']}"]
    if "conditioning" in found:
        parts.append(f"κ(P) by length, median (largest) of the heads\n{_condition_numbers(found['conditioning'])}")
    if "hit_rate" in found:
        columns = {name: _mean_of(name) for name in MEASURES}
        rows = _by_layer(found["hit_rate"], columns, "{:.4f}")
        rows.append(["all", *(f"{found['mean_hit_rate'][name]:.4f}" for name in MEASURES)])
        parts.append(f"hit rate: A, W and |W|/Σ|W| on what should be read; negative share of |W|\n{_table(rows)}")
    if "jacobian" in found:
        columns = {"off-diagonal": _mean_of("off_diagonal"), "‖∂o/∂q‖": _mean_of("query_jacobian")}
        rows = _by_layer(found["jacobian"], columns, "{:.3g}")
        parts.append(f"softmax Jacobian, mean of the heads\n{_table(rows)}")
    return "\n\n".join(parts)


def _condition_numbers(records: Sequence[Record]) -> str:
    lengths = sorted({each["length"] for each in records})
    rows = [["layer", *map(str, lengths), "‖P⁻¹‖"]]
    for layer in dict.fromkeys(each["layer"] for each in records):
        ours = [each for each in records if each["layer"] == layer]
        cells = [[each["kappa"] for each in ours if each["length"] == length] for length in lengths]
        shown = [f"{median(cell):.4g} ({max(cell):.4g})" if cell else "" for cell in cells]
        rows.append([str(layer), *shown, f"{max(each['inverse_norm'] for each in ours):.4f}"])
    return _table(rows)


def _mean_of(name: str) -> Callable[[Sequence[Record]], float | None]:
    def of(records: Sequence[Record]) -> float | None:
        values = [each[name] for each in records if each[name] is not None]
        return mean(values) if values else None

    return of


def _by_layer(
    records: Sequence[Record], columns: dict[str, Callable[[Sequence[Record]], float | None]], shape: str
) -> list[list[str]]:
    rows = [["layer", *columns]]
    for layer in dict.fromkeys(each["layer"] for each in records):
        values = [value([each for each in records if each["layer"] == layer]) for value in columns.values()]
        rows.append([str(layer), *("-" if value is None else shape.format(value) for value in values)])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
