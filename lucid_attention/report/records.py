"""Results: the contents of the report, checked before anything is drawn.

A result is a dictionary of one `kind`: an "experiment" (the default, as in result.json), a "training" run, an
"evaluation" or a "comparison" of them (all three made by `runs`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
RESULT = "result.json"
VERDICTS = ("holds", "partly", "does not hold", "measured", "too small to judge")
# The texts that results of each kind must have.
TEXTS = {
    "experiment": (
        *("name", "scale", "title", "section", "claim", "paper", "ours", "because", "command", "machine", "finished"),
    ),
    "training": ("name", "title", "about", "ours"),
    "evaluation": ("name", "title", "about", "ours"),
    "comparison": ("name", "title", "about", "ours"),
}
# The fields that each kind of figure must have, beside its title.
FIGURES: dict[str, dict[str, type]] = {
    "lines": {"x": dict, "y": dict, "series": list},
    "heatmaps": {"rows": dict, "columns": dict, "range": list, "panels": list},
    "bars": {"value": dict, "groups": list},
}

Result = dict[str, Any]


class ReportError(ValueError):
    """A result that cannot be shown. The message names the file and the error."""


def kind_of(result: Result) -> str:
    """ "experiment", "training", "evaluation" or "comparison"."""
    return str(result.get("kind", "experiment"))


def read_json(file: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{file}: not JSON: {error}") from error


def read_result(file: Path) -> Result:
    """The result of an experiment, checked."""
    return checked(read_json(file), str(file))


def checked_all(results: Sequence[Result]) -> list[Result]:
    """Every result, checked; at least one."""
    if not results:
        raise ReportError("no results to report")
    return [checked(result, f"results[{number}]") for number, result in enumerate(results)]


def checked(result: Any, where: str) -> Result:
    """A copy of the result, with None for NaN and infinities, which JSON lacks. `where` names the result in errors."""
    if not isinstance(result, dict):
        raise ReportError(f"{where}: expected an object, got {type(result).__name__}")
    if result.get("format") != FORMAT:
        raise ReportError(f"{where}: format must be {FORMAT}, got {result.get('format')!r}")
    if kind_of(result) not in TEXTS:
        raise ReportError(f"{where}: kind must be one of {', '.join(TEXTS)}, got {kind_of(result)!r}")
    result = _finite(result)
    for key in TEXTS[kind_of(result)]:
        expect(result, key, str, where)
    if kind_of(result) != "experiment":
        expect(result, "facts", list, where)
    elif result.get("verdict") not in VERDICTS:
        raise ReportError(f"{where}: verdict must be one of {', '.join(VERDICTS)}, got {result.get('verdict')!r}")
    for number, figure in enumerate(expect(result, "figures", list, where)):
        _check_figure(figure, f"{where}: figures[{number}]")
    for number, table in enumerate(expect(result, "tables", list, where)):
        _check_table(table, f"{where}: tables[{number}]")
    return result


def expect(holder: Any, key: str, expected: Any, where: str) -> Any:
    """The value of `key`, which must be of a type, or of one of a tuple of types."""
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        types = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join(kind.__name__ for kind in types)
        raise ReportError(f"{where}: {key} must be of type {names}, got {value!r:.80}")
    return value


def _check_figure(figure: Any, where: str) -> None:
    kind = figure.get("kind") if isinstance(figure, dict) else None
    if kind not in FIGURES:
        raise ReportError(f"{where}: kind must be one of {', '.join(FIGURES)}, got {kind!r}")
    for key, expected in FIGURES[kind].items():
        expect(figure, key, expected, where)
    expect(figure, "title", str, where)
    if kind == "lines":
        for number, series in enumerate(figure["series"]):
            _check_series(series, f"{where}: series[{number}]")
    elif kind == "bars":
        for number, group in enumerate(figure["groups"]):
            place = f"{where}: groups[{number}]"
            for bar_number, bar in enumerate(expect(group, "bars", list, place)):
                _check_role(bar, f"{place}: bars[{bar_number}]")
    else:
        if len(figure["range"]) != 2 or None in figure["range"]:
            raise ReportError(f"{where}: range must be [low, high], got {figure['range']!r}")
        for number, panel in enumerate(figure["panels"]):
            _check_panel(panel, f"{where}: panels[{number}]")


def _check_series(series: Any, where: str) -> None:
    _check_role(series, where)
    size = len(expect(series, "x", list, where))
    for key in ("y", "spread"):
        values = series.get(key)
        if (values is not None or key == "y") and len(expect(series, key, list, where)) != size:
            raise ReportError(f"{where}: {key} must be as long as x, {size}, got {len(series[key])}")


def _check_panel(panel: Any, where: str) -> None:
    rows, columns = len(expect(panel, "rows", list, where)), len(expect(panel, "columns", list, where))
    values = expect(panel, "values", list, where)
    if len(values) != rows or any(not isinstance(row, list) or len(row) != columns for row in values):
        raise ReportError(f"{where}: values must be {rows} rows of {columns}")
    if not rows or not columns:
        raise ReportError(f"{where}: rows and columns must not be empty")


def _check_table(table: Any, where: str) -> None:
    expect(table, "title", str, where)
    width = len(expect(table, "columns", list, where))
    for row in expect(table, "rows", list, where):
        if not isinstance(row, list) or len(row) != width:
            raise ReportError(f"{where}: every row must have {width} cells, got {row!r}")


def _check_role(item: Any, where: str) -> None:
    """A role is the name of an attention, or "control". Every name has a colour."""
    expect(item, "name", str, where)
    if not expect(item, "role", str, where):
        raise ReportError(f"{where}: role must be the name of an attention or 'control', got ''")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value
