"""The report: what holds at a glance, then a section for each claim. One file, no scripts, nothing fetched."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from .figures import command_html, figure_html, table_html
from .numbers import duration, shown, typeset
from .palette import style_sheet
from .records import VERDICTS

TITLE = "LUCID attention: what holds, measured"
# Shapes tell the verdicts apart without colour.
ICONS = {
    "holds": '<circle r="8"/><path d="M-4 .3-1.2 3.2 4-3"/>',
    "partly": '<circle r="7" class="open"/><path d="M0-7A7 7 0 0 0 0 7z" class="full"/>',
    "does not hold": '<circle r="8"/><path d="M-3-3 3 3M3-3-3 3"/>',
    "measured": '<path d="M-6 7V2M0 7V-7M6 7V-2" class="bars"/>',
    "too small to judge": '<circle r="7" class="open"/><path d="M-4 0h.1M0 0h.1M4 0h.1" class="dots"/>',
}
# In an overview: "3 hold".
PLURALS = {"holds": "hold", "does not hold": "do not hold"}


def page_html(results: Sequence[dict[str, Any]], title: str = TITLE) -> str:
    """The whole page, from checked results."""
    names = _anchors(results)
    style = style_sheet() + (files(__package__) / "page.css").read_text(encoding="utf-8")
    sections = "\n".join(_section(result, name) for result, name in zip(results, names, strict=True))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}
</style>
</head>
<body>
{_header(results, title)}
<main>
{_overview(results, names)}
{sections}
</main>
<footer><p>Made by <code>lucid report</code>. The same numbers are in the JSON file beside this page. Spreads are
standard deviations over seeds.</p></footer>
</body>
</html>
"""


def _anchors(results: Sequence[dict[str, Any]]) -> list[str]:
    """An id for each section: its name, with a number where the name came before."""
    found: list[str] = []
    for number, result in enumerate(results):
        plain = "".join(each if each.isascii() and (each.isalnum() or each in "_-") else "-" for each in result["name"])
        name = plain or "experiment"
        found.append(f"{name}-{number + 1}" if name in found else name)
    return found


def _header(results: Sequence[dict[str, Any]], title: str) -> str:
    counts = {verdict: sum(result["verdict"] == verdict for result in results) for verdict in VERDICTS}
    tally = "".join(_count(verdict, count) for verdict, count in counts.items() if count)
    facts = [
        ("Machine", _distinct(results, "machine")),
        ("Date", _dates(results)),
        ("Scale", _distinct(results, "scale")),
    ]
    if times := [result["seconds"] for result in results if isinstance(result.get("seconds"), (int, float))]:
        facts.append(("Time", f"{duration(sum(times))} of computing"))
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"""<header>
<h1>{escape(title)}</h1>
<p class="lead">LUCID attention reads like softmax attention, but stores corrections instead of values: what each value
adds to what the memory already answers for its key.</p>
<div class="formula">
<span><i>O</i> = softmax(<i>QK</i><sup>⊤</sup>/√<i>D</i> + causal) <b><i>P</i><sup>−1</sup></b> <i>V</i></span>
<span><b><i>P</i><sub>ij</sub></b> = exp(√<i>D</i> (cos <i>θ</i><sub>ij</sub> − 1)), <i>j</i> ≤ <i>i</i></span>
</div>
<ul class="tally" aria-label="verdicts">{tally}</ul>
<dl class="facts">{listed}</dl>
</header>"""


def _count(verdict: str, count: int) -> str:
    words = PLURALS.get(verdict, verdict) if count > 1 else verdict
    return f'<li class="{_slug(verdict)}">{_icon(verdict)}<b>{count}</b> {words}</li>'


def _overview(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><a href="#{name}">{escape(result["title"])}</a></th>'
        f'<td data-label="Paper">{_text(result["paper"])}</td><td data-label="Here">{_text(result["ours"])}</td>'
        f"<td>{_chip(result['verdict'])}</td></tr>"
        for result, name in zip(results, names, strict=True)
    )
    return f"""<section class="overview" aria-labelledby="overview">
<h2 id="overview">At a glance</h2>
<table><thead><tr>{"".join(f'<th scope="col">{each}</th>' for each in ("Claim", "Paper", "Here", "Verdict"))}</tr>
</thead><tbody>{rows}</tbody></table>
</section>"""


def _section(result: dict[str, Any], name: str) -> str:
    command = result["command"]
    figures = "".join(
        figure_html(figure, command, f"{name}-{number}") for number, figure in enumerate(result["figures"], 1)
    )
    tables = "".join(f'<div class="table">{table_html(table)}</div>' for table in result["tables"])
    tables = f'<div class="tables">{tables}</div>' if tables else ""
    seeds = result.get("seeds")
    facts = [f"scale {result['scale']}", duration(result.get("seconds"))]
    if seeds is not None:
        facts.append(f"{shown(seeds)} seed{'' if seeds == 1 else 's'}")
    facts = [f'<span class="together">{escape(each)}</span>' for each in [*facts, result["finished"]]]
    facts.insert(-1, escape(result["machine"]))
    # A single picture stands beside the text.
    beside = " beside" if figures.count("<figure") == 1 and figures.startswith('<figure class="narrow"') else ""
    return f"""<section class="experiment {_slug(result["verdict"])}" id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title"><span>{escape(result["title"])}</span>{_chip(result["verdict"])}</h2>
<div class="claim"><p class="label">The paper claims ({escape(_place(result["section"]))})</p>
<p>{_text(result["claim"])}</p></div>
<div class="outcome{beside}">
<div>
<dl class="versus"><div><dt>Paper</dt><dd>{_text(result["paper"])}</dd></div>
<div class="here"><dt>Here</dt><dd>{_text(result["ours"])}</dd></div></dl>
<p class="because"><strong>{escape(result["verdict"].capitalize())}.</strong> {_text(result["because"])}</p>
</div>
<div class="figures">{figures}</div>
</div>
{tables}
<div class="made"><p>Made by</p>{command_html(command)}<p>{" · ".join(facts)}</p>
<p><a href="#overview">Back to the overview</a></p></div>
</section>"""


def _text(value: str) -> str:
    return escape(typeset(value))


def _chip(verdict: str) -> str:
    return f'<span class="chip {_slug(verdict)}">{_icon(verdict)}{escape(verdict)}</span>'


def _icon(verdict: str) -> str:
    return f'<svg class="icon" viewBox="-9 -9 18 18" aria-hidden="true">{ICONS[verdict]}</svg>'


def _slug(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _place(section: str) -> str:
    """Appendices have letters: A.4; sections get a sign: §2.1."""
    return f"§{section}" if section[:1].isdigit() else section


def _distinct(results: Sequence[dict[str, Any]], key: str) -> str:
    return "; ".join(dict.fromkeys(str(result[key]) for result in results))


def _dates(results: Sequence[dict[str, Any]]) -> str:
    days = sorted({str(result["finished"])[:10] for result in results})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
