"""Results: the contents of the report, checked before anything is drawn.

A result is a dictionary of one `kind`: an "experiment" (the default, as in result.json), a "training" run, an
"evaluation" or a "comparison" of them (all three made by `runs`).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lucid_attention import files

FORMAT = 1
RESULT = "result.json"
VERDICTS = ("holds", "partly", "does not hold", "incomplete", "too small to judge")
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

NUMBER = (int, float)

Result = dict[str, Any]


class ReportError(ValueError):
    """A result that cannot be shown. The message names the file and the error."""


def kind_of(result: Result) -> str:
    """ "experiment", "training", "evaluation" or "comparison"."""
    return str(result.get("kind", "experiment"))


def read_json(file: Path, expected: type = dict) -> Any:
    """The content of a JSON file, which must be of a type; object for any."""
    return parse_json(_content(file), str(file), expected)


def _content(file: Path) -> bytes:
    try:
        return files.read_bytes(file)
    except files.UnreadableFile as error:
        raise ReportError(str(error)) from error


def parse_json(content: bytes, where: str, expected: type = dict) -> Any:
    """The value that a JSON text holds. where: the file, and the line, for errors."""
    try:
        return files.parse_json(content, where, expected)
    except files.UnreadableFile as error:
        raise ReportError(str(error)) from error


def read_result(file: Path) -> Result:
    """The result of an experiment, checked."""
    return checked(read_json(file), str(file))


def checked_evaluation(content: Any, where: str) -> dict[str, Any]:
    """The content of a results.json of `lucid eval`, checked: {"checkpoint", "cells"}, and "means" if it has some."""
    checkpoint = expect(content, "checkpoint", dict, where)
    expect(checkpoint, "name", str, f"{where}: checkpoint")
    check_attention(checkpoint.get("attention") or "softmax", f"{where}: checkpoint")
    for number, cell in enumerate(expect(content, "cells", list, where)):
        _check_cell(cell, f"{where}: cells[{number}]")
    for number, mean in enumerate(expect(content, "means", list, where) if "means" in content else []):
        expect(mean, "over", dict, f"{where}: means[{number}]")
        expect(mean, "cells", list, f"{where}: means[{number}]")
        _check_cell({"name": "", **mean}, f"{where}: means[{number}]")
    return dict(content)


def check_attention(attention: Any, where: str) -> None:
    """Refuse what is neither the name of an attention nor a list of names, one for every layer."""
    names = attention if isinstance(attention, list) else [attention]
    if not names or not all(isinstance(name, str) for name in names):
        raise ReportError(f"{where}: attention must be a name or a list of names, got {attention!r:.80}")


def _check_cell(cell: Any, where: str) -> None:
    for key in ("name", "family", "metric"):
        expect(cell, key, str, where)
    for label, value in expect(cell, "labels", dict, where).items():
        if not isinstance(value, (str, *NUMBER)):
            raise ReportError(f"{where}: the label {label!r} must be a text or a number, got {value!r:.80}")
    if expect(cell, "samples", int, where) < 1:
        raise ReportError(f"{where}: samples must be at least 1, got {cell['samples']}")
    expect(cell, "mean", NUMBER, where)
    for key, expected in {"standard_error": NUMBER, "out_of": NUMBER, "versions": dict, "sha256": str}.items():
        if cell.get(key) is not None:
            expect(cell, key, expected, where)
    if cell.get("out_of") and not math.isnan(cell["mean"]) and not 0 <= cell["mean"] <= cell["out_of"]:
        raise ReportError(f"{where}: mean must be 0 to out_of, {cell['out_of']}, got {cell['mean']}")


def checked_all(results: Sequence[Result]) -> list[Result]:
    """Every result, checked; at least one."""
    if not results:
        raise ReportError("no results to report")
    return [checked(result, f"results[{number}]") for number, result in enumerate(results)]


def checked(result: Any, where: str) -> Result:
    """A copy of the result, with None for numbers that are not finite. `where` names the result in errors."""
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
    _check_parts(figure, kind, where)
    if kind == "lines":
        for number, series in enumerate(figure["series"]):
            _check_series(series, f"{where}: series[{number}]")
    elif kind == "bars":
        for number, group in enumerate(figure["groups"]):
            place = f"{where}: groups[{number}]"
            for bar_number, bar in enumerate(expect(group, "bars", list, place)):
                _check_role(bar, f"{place}: bars[{bar_number}]")
                _check_numbers([bar.get("value"), bar.get("spread")], f"{place}: bars[{bar_number}]")
    else:
        if len(figure["range"]) != 2 or not all(map(is_finite, figure["range"])):
            raise ReportError(f"{where}: range must be [low, high], got {figure['range']!r}")
        for number, panel in enumerate(figure["panels"]):
            _check_panel(panel, f"{where}: panels[{number}]")


def _check_parts(figure: dict[str, Any], kind: str, where: str) -> None:
    """The parts that a figure may have: a note, the labels and ranges of its axes, lines of reference, marks."""
    if figure.get("note") is not None:
        expect(figure, "note", str, where)
    for key in (key for key, expected in FIGURES[kind].items() if expected is dict):
        ends = figure[key].get("range")
        if ends is not None and (not isinstance(ends, list) or len(ends) != 2 or not all(map(is_finite, ends))):
            raise ReportError(f"{where}: {key}: range must be [low, high], got {ends!r:.80}")
    for key, number in (("references", "value"), ("marks", "x")):
        for place, part in enumerate(expect(figure, key, list, where) if figure.get(key) is not None else []):
            expect(part, "name", str, f"{where}: {key}[{place}]")
            _check_numbers([part.get(number)], f"{where}: {key}[{place}]")


def _check_numbers(values: Sequence[Any], where: str) -> None:
    wrong = [value for value in values if value is not None and not is_finite(value)]
    if wrong:
        raise ReportError(f"{where}: expected numbers, got {wrong[0]!r:.80}")


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a figure can show."""
    try:
        return isinstance(value, NUMBER) and not isinstance(value, bool) and math.isfinite(value)
    # An integer beyond the largest float.
    except OverflowError:
        return False


def _check_series(series: Any, where: str) -> None:
    _check_role(series, where)
    size = len(expect(series, "x", list, where))
    _check_numbers(series["x"], f"{where}: x")
    for key in ("y", "spread"):
        values = series.get(key)
        if (values is not None or key == "y") and len(expect(series, key, list, where)) != size:
            raise ReportError(f"{where}: {key} must be as long as x, {size}, got {len(series[key])}")
        _check_numbers(values or [], f"{where}: {key}")


def _check_panel(panel: Any, where: str) -> None:
    rows, columns = len(expect(panel, "rows", list, where)), len(expect(panel, "columns", list, where))
    values = expect(panel, "values", list, where)
    if len(values) != rows or any(not isinstance(row, list) or len(row) != columns for row in values):
        raise ReportError(f"{where}: values must be {rows} rows of {columns}")
    for row in values:
        _check_numbers(row, f"{where}: values")
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
    if isinstance(value, NUMBER) and not isinstance(value, bool) and not is_finite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return value
