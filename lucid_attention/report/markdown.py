"""The results as a Markdown page: tables, no pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .data import tables_of
from .numbers import duration, shown
from .write import checked_all, write_text

TITLE = "Results"
MOST_ROWS = 12
# What Markdown or HTML would take for itself.
SPECIAL = {each: f"\\{each}" for each in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": " ", "\r": " "}


def write_markdown(results: Sequence[dict[str, Any]], out: Path, title: str = TITLE) -> Path:
    """Write a page of `results` (as in result.json) to `out`. The same results give the same bytes."""
    return write_text(out, markdown(checked_all(results), title))


def markdown(results: Sequence[dict[str, Any]], title: str = TITLE) -> str:
    """The page, from checked results."""
    columns = ["claim", "paper", "here", "verdict", "because"]
    rows = [
        [result["title"], result["paper"], result["ours"], result["verdict"], result["because"]] for result in results
    ]
    parts = [
        f"# {plain(title)}",
        "Written by `lucid report RUNS --markdown FILE` from the records of the commands below; not edited by hand. "
        "Spreads are standard deviations over seeds.",
        _table(columns, rows),
    ]
    for result in results:
        parts += _section(result)
    return "\n\n".join(parts) + "\n"


def plain(text: Any) -> str:
    """Text that means itself."""
    return "".join(SPECIAL.get(each, each) for each in str(text).strip())


def _section(result: dict[str, Any]) -> list[str]:
    section = result["section"]
    place = f"§{section}" if section[:1].isdigit() else section
    parts = [
        f"## {plain(result['title'])}",
        f"*The paper, {plain(place)}:* {plain(result['claim'])}",
        f"*Paper:* {plain(result['paper'])}  \n*Here:* {plain(result['ours'])}",
        f"**{plain(result['verdict']).capitalize()}.** {plain(result['because'])}",
        f"    {' '.join(result['command'].split())}",
    ]
    facts = [f"scale {result['scale']}", duration(result.get("seconds"))]
    if result.get("seeds") is not None:
        facts.append(f"{result['seeds']} seed{'' if result['seeds'] == 1 else 's'}")
    parts.append(plain(", ".join([*facts, result["machine"], result["finished"]])) + ".")
    for table in result["tables"]:
        parts += _titled(table["title"], table.get("note"), _table(table["columns"], table["rows"]))
    for figure in result["figures"]:
        parts += _figure(figure)
    return parts


def _figure(figure: dict[str, Any]) -> list[str]:
    # A large map says nothing as numbers.
    tables = [table for table in tables_of(figure, MOST_ROWS) if "text" not in table]
    parts: list[str] = []
    for number, table in enumerate(tables):
        title = f"{figure['title']}: {table['title']}" if table["title"] else figure["title"]
        notes = [table["note"], figure.get("note") if number == len(tables) - 1 else ""]
        parts += _titled(title, " ".join(each for each in notes if each), _table(table["columns"], table["rows"]))
    return parts


def _titled(title: str, note: str | None, table: str) -> list[str]:
    return [f"**{plain(title)}**", table, *([plain(note)] if note else [])]


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([shown(cell) for cell in row] for row in rows)]
    return "\n".join(
        f"| {' | '.join(str(cell) if number == 1 else plain(cell) for cell in line)} |"
        for number, line in enumerate(lines)
    )
