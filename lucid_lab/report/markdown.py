"""The results as a Markdown page: tables without pictures."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lucid_attention.files import write_whole

from .numbers import duration, shown, tables_of
from .records import checked_all, kind_of

TITLE = "Results"
MOST_ROWS = 12
# Characters with a meaning in Markdown or HTML.
SPECIAL = {sign: f"\\{sign}" for sign in "\\`*_[]|#~"}
SPECIAL |= {"<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": " ", "\r": " "}


def write_markdown(results: Sequence[dict[str, Any]], out: Path, title: str = TITLE) -> Path:
    """Write a page of `results` to `out`. Equal results give equal bytes."""
    return write_whole(out, markdown(checked_all(results), title))


def markdown(results: Sequence[dict[str, Any]], title: str = TITLE) -> str:
    """The page, from checked results."""
    experiments = [result for result in results if kind_of(result) == "experiment"]
    runs = [result for result in results if kind_of(result) != "experiment"]
    source = "the records of the commands below" if experiments else "the files of `lucid train` and `lucid eval`"
    spreads = " Spreads are standard deviations over seeds." if experiments else ""
    parts = [
        f"# {plain(title)}",
        f"Written by `lucid report RUNS --markdown FILE` from {source}; not edited by hand.{spreads}",
    ]
    if experiments:
        keys = ("title", "paper", "ours", "verdict", "because")
        rows = [[result[key] for key in keys] for result in experiments]
        parts.append(_table(["claim", "paper", "here", "verdict", "because"], rows))
    if runs:
        rows = [[kind_of(result), result["title"], result["about"], result["ours"]] for result in runs]
        parts.append(_table(["kind", "name", "what", "result"], rows))
    for result in experiments:
        parts += _section(result)
    for result in runs:
        parts += _run_section(result)
    return "\n\n".join(parts) + "\n"


def plain(text: Any) -> str:
    """The text with its special characters escaped."""
    return "".join(SPECIAL.get(character, character) for character in str(text).strip())


def _section(result: dict[str, Any]) -> list[str]:
    section = result["section"]
    place = f"§{section}" if section[:1].isdigit() else section
    said = "Not in the paper" if section == "not in the paper" else f"The paper, {plain(place)}"
    parts = [
        f"## {plain(result['title'])}",
        f"*{said}:* {plain(result['claim'])}",
        f"*Paper:* {plain(result['paper'])}  \n*Here:* {plain(result['ours'])}",
        f"**{plain(result['verdict']).capitalize()}.** {plain(result['because'])}",
        *([f"*Rule:* {plain(result['rule'])}."] if result.get("rule") else []),
        _command(result["command"]),
    ]
    facts = [f"scale {result['scale']}", duration(result.get("seconds"))]
    if result.get("seeds") is not None:
        facts.append(f"{result['seeds']} seed{'' if result['seeds'] == 1 else 's'}")
    parts.append(plain(", ".join([*facts, result["machine"], result["finished"]])) + ".")
    return [*parts, *_tables(result)]


def _command(command: str) -> str:
    """A command in a block of code, as HTML where it has signs that no block of Markdown can escape."""
    line = " ".join(command.split())
    return f"    {line}" if escape(line, quote=False) == line else f"<pre><code>{escape(line)}</code></pre>"


def _run_section(result: dict[str, Any]) -> list[str]:
    parts = [f"## {plain(result['title'])}", plain(result["about"]), f"**{plain(result['ours'])}**"]
    if result["facts"]:
        parts.append("; ".join(f"{plain(name)} {plain(value)}" for name, value in result["facts"]) + ".")
    return [*parts, *_tables(result)]


def _tables(result: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    for table in result["tables"]:
        parts += _titled(table["title"], table.get("note"), _table(table["columns"], table["rows"]))
    for figure in result["figures"]:
        parts += _figure(figure)
    return parts


def _figure(figure: dict[str, Any]) -> list[str]:
    # A large map is left out: nobody reads its numbers.
    tables = [table for table in tables_of(figure, MOST_ROWS) if "text" not in table]
    parts: list[str] = []
    for number, table in enumerate(tables):
        title = f"{figure['title']}: {table['title']}" if table["title"] else figure["title"]
        notes = [table["note"], figure.get("note") if number == len(tables) - 1 else ""]
        parts += _titled(title, " ".join(text for text in notes if text), _table(table["columns"], table["rows"]))
    return parts


def _titled(title: str, note: str | None, table: str) -> list[str]:
    return [f"**{plain(title)}**", table, *([plain(note)] if note else [])]


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([shown(cell) for cell in row] for row in rows)]
    return "\n".join(
        f"| {' | '.join(str(cell) if number == 1 else plain(cell) for cell in line)} |"
        for number, line in enumerate(lines)
    )
