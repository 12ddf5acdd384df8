"""A figure on the page: caption, legend, drawing; its numbers and its command open on a click."""

from html import escape
from typing import Any

from .bars import draw_bars
from .lines import draw_lines
from .numbers import shown, tables_of, typeset
from .palette import OUTLINES, Look, looks
from .panels import draw_panels, gradient, is_small, limits

MOST_ROWS = 60
BAND = "± standard deviation over seeds"


def figure_html(figure: dict[str, Any], command: str, prefix: str) -> str:
    """One figure, in rows that line up with those of a neighbour. command: may be empty. prefix: of the ids in it."""
    kind = figure["kind"]
    if kind == "lines":
        legend, body = _line_legend(figure), f'<div class="panels one">{draw_lines(figure, prefix)}</div>'
    elif kind == "bars":
        legend, body = "", _panels(draw_bars(figure, prefix), "bars")
    else:
        shape = "pixels" if not figure.get("numbers", True) else "small cells" if is_small(figure) else "cells"
        legend, body = _scale(figure), _panels(draw_panels(figure, prefix), shape)
    note = f'<p class="note">{escape(figure["note"])}</p>' if figure.get("note") else "<div></div>"
    size = "wide" if body.count("<svg") > 1 else "narrow"
    numbers = "".join(table_html(table) for table in tables_of(figure, MOST_ROWS))
    summary, made_by = ("Numbers and command", command_html(command)) if command else ("Numbers", "")
    return (
        f'<figure class="{size}"><figcaption><h3>{escape(figure["title"])}</h3></figcaption>{legend}{body}{note}'
        f"<details><summary>{summary}</summary>{numbers}{made_by}</details></figure>"
    )


def table_html(table: dict[str, Any]) -> str:
    """A table in a box that scrolls sideways, so that the page does not."""
    heading = f'<p class="caption">{escape(typeset(table["title"]))}</p>' if table["title"] else ""
    note = f'<p class="note">{escape(table["note"])}</p>' if table.get("note") else ""
    if "text" in table:
        return f'{heading}<pre class="matrix" tabindex="0">{escape(table["text"])}</pre>{note}'
    numeric = [at > 0 and all(_is_number(row[at]) for row in table["rows"]) for at in range(len(table["columns"]))]
    sides = [' class="number"' if column else "" for column in numeric]
    head = "".join(
        f'<th scope="col"{side}>{escape(str(name))}</th>' for name, side in zip(table["columns"], sides, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row, range(len(row)), sides))}</tr>" for row in table["rows"])
    label = escape(table["title"])
    body = f'<table aria-label="{label}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'{heading}<div class="scroll" tabindex="0">{body}</div>{note}'


def command_html(command: str) -> str:
    """A command. One click selects all of it."""
    return f'<pre class="command"><code>{escape(command)}</code></pre>'


def _cell(value: Any, column: int, side: str) -> str:
    text = escape(typeset(shown(value)))
    return f"<td{side}>{text}</td>" if column else f'<th scope="row">{text}</th>'


def _is_number(value: Any) -> bool:
    """Whether a cell is a number, also with a sign, a spread or a unit."""
    return not isinstance(value, str) or value.lstrip("+-−–±~≈<>≤≥ ")[:1].isdigit() or value in ("", "–")


def _panels(drawn: list[tuple[str, str]], shape: str) -> str:
    parts = []
    for heading, picture in drawn:
        title = f"<h4>{escape(heading)}</h4>" if heading else ""
        parts.append(f'<div class="panel">{title}{picture}</div>')
    single = " one" if len(parts) == 1 else ""
    return f'<div class="panels {shape}{single}">{"".join(parts)}</div>'


def _line_legend(figure: dict[str, Any]) -> str:
    entries = []
    for series, style in zip(figure["series"], looks(figure["series"]), strict=True):
        weight = ' class="lucid"' if series["role"] == "lucid" else ""
        entries.append(f"<li{weight}>{_sample(style)}{escape(series['name'])}</li>")
    band = any(series.get("spread") for series in figure["series"])
    hint = f'<li class="hint">band: {escape(figure.get("band", BAND))}</li>' if band else ""
    return f'<ul class="legend">{"".join(entries)}{hint}</ul>'


def _sample(style: Look) -> str:
    """A short piece of the line with its marker, for the legend."""
    colour = f"var(--{style.colour})"
    dashes = (
        f' stroke-dasharray="{" ".join(str(length * style.width / 1.6) for length in style.dashes)}"'
        if style.dashes
        else ""
    )
    line = f'<path d="M-15 0h30" style="stroke:{colour};stroke-width:{style.width}"{dashes}/>'
    mark = f'<path d="{OUTLINES[style.marker]}" style="fill:{colour}"/>'
    return f'<svg class="sample" viewBox="-15 -6 30 12" aria-hidden="true">{line}{mark}</svg>'


def _scale(figure: dict[str, Any]) -> str:
    low, high = limits(figure)
    unit = f" {figure['unit']}" if figure.get("unit") else ""
    colours = ",".join(gradient(figure))
    ends = [f"<span>{escape(shown(end) + unit)}</span>" for end in (low, high)]
    bar = f'<span class="gradient" style="background:linear-gradient(90deg,{colours})"></span>'
    return f'<div class="scale" role="img" aria-label="colour scale">{ends[0]}{bar}{ends[1]}</div>'
