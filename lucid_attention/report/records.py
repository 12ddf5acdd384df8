"""Results of experiments, as `result.json` files hold them: found, read and checked at the door."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .palette import ROLES

FORMAT = 1
RESULT = "result.json"
VERDICTS = ("holds", "partly", "does not hold", "measured", "too small to judge")
TEXTS = ("name", "scale", "title", "section", "claim", "paper", "ours", "because", "command", "machine", "finished")
# What each kind of figure must have, beside its title.
FIGURES: dict[str, dict[str, type]] = {
    "lines": {"x": dict, "y": dict, "series": list},
    "heatmaps": {"rows": dict, "columns": dict, "range": list, "panels": list},
    "bars": {"value": dict, "groups": list},
}

Result = dict[str, Any]


class ReportError(ValueError):
    """A result that cannot be shown; the message names the file and what is wrong in it."""


def find_results(paths: Iterable[Path]) -> list[Result]:
    """The results in files, and in folders searched for `result.json`.

    In the order given; of a folder by verdict, the best first, and then by path.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.rglob(RESULT))
            found.sort(key=lambda file: VERDICTS.index(read_result(file)["verdict"]))
            if not found:
                raise ReportError(f"{path}: no {RESULT} in it; `lucid experiment NAME` writes one")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise ReportError(f"{path}: no such file or folder")
    unique = {file.resolve(): file for file in reversed(files)}
    return [read_result(file) for file in reversed(unique.values())]


def read_result(file: Path) -> Result:
    """One result, checked."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ReportError(f"{file}: not JSON: {error}") from error
    return checked(result, str(file))


def checked(result: Any, where: str) -> Result:
    """A copy with None for numbers that JSON does not have. `where` names the result in complaints."""
    if not isinstance(result, dict):
        raise ReportError(f"{where}: expected an object, got {type(result).__name__}")
    if result.get("format") != FORMAT:
        raise ReportError(f"{where}: format must be {FORMAT}, got {result.get('format')!r}")
    result = _finite(result)
    for key in TEXTS:
        _expect(result, key, str, where)
    if result.get("verdict") not in VERDICTS:
        raise ReportError(f"{where}: verdict must be one of {', '.join(VERDICTS)}, got {result.get('verdict')!r}")
    for number, figure in enumerate(_expect(result, "figures", list, where)):
        _check_figure(figure, f"{where}: figures[{number}]")
    for number, table in enumerate(_expect(result, "tables", list, where)):
        _check_table(table, f"{where}: tables[{number}]")
    return result


def _check_figure(figure: Any, where: str) -> None:
    kind = figure.get("kind") if isinstance(figure, dict) else None
    if kind not in FIGURES:
        raise ReportError(f"{where}: kind must be one of {', '.join(FIGURES)}, got {kind!r}")
    for key, expected in FIGURES[kind].items():
        _expect(figure, key, expected, where)
    _expect(figure, "title", str, where)
    if kind == "lines":
        for number, series in enumerate(figure["series"]):
            _check_series(series, f"{where}: series[{number}]")
    elif kind == "bars":
        for number, group in enumerate(figure["groups"]):
            here = f"{where}: groups[{number}]"
            for at, bar in enumerate(_expect(group, "bars", list, here)):
                _check_role(bar, f"{here}: bars[{at}]")
    else:
        if len(figure["range"]) != 2 or None in figure["range"]:
            raise ReportError(f"{where}: range must be [low, high], got {figure['range']!r}")
        for number, panel in enumerate(figure["panels"]):
            _check_panel(panel, f"{where}: panels[{number}]")


def _check_series(series: Any, where: str) -> None:
    _check_role(series, where)
    size = len(_expect(series, "x", list, where))
    for key in ("y", "spread"):
        values = series.get(key)
        if (values is not None or key == "y") and len(_expect(series, key, list, where)) != size:
            raise ReportError(f"{where}: {key} must be as long as x, {size}, got {len(series[key])}")


def _check_panel(panel: Any, where: str) -> None:
    rows, columns = len(_expect(panel, "rows", list, where)), len(_expect(panel, "columns", list, where))
    values = _expect(panel, "values", list, where)
    if len(values) != rows or any(not isinstance(row, list) or len(row) != columns for row in values):
        raise ReportError(f"{where}: values must be {rows} rows of {columns}")
    if not rows or not columns:
        raise ReportError(f"{where}: rows and columns must not be empty")


def _check_table(table: Any, where: str) -> None:
    _expect(table, "title", str, where)
    width = len(_expect(table, "columns", list, where))
    for row in _expect(table, "rows", list, where):
        if not isinstance(row, list) or len(row) != width:
            raise ReportError(f"{where}: every row must have {width} cells, got {row!r}")


def _check_role(item: Any, where: str) -> None:
    _expect(item, "name", str, where)
    if item.get("role") not in ROLES:
        raise ReportError(f"{where}: role must be one of {', '.join(ROLES)}, got {item.get('role')!r}")


def _expect(holder: Any, key: str, expected: type, where: str) -> Any:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, expected):
        raise ReportError(f"{where}: {key} must be of type {expected.__name__}, got {value!r:.80}")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return value
