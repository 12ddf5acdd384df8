"""The report: an overview, then a section for each result. One file without scripts that fetches nothing."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lucid_attention.files import UnreadableFile, read_json, write_whole

from .figures import command_html, figure_html, table_html
from .numbers import duration, shown, typeset
from .palette import style_sheet
from .records import VERDICTS, ReportError, checked_all, kind_of

TITLE = "LUCID attention: what holds, measured"
# The title of a page without experiments.
RUNS_TITLE = "LUCID attention: training runs and evaluations"
# What a browser may do with the page: its own styles, and pictures inside the page. No scripts, nothing from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
# Shapes tell the verdicts apart without colour.
ICONS = {
    "holds": '<circle r="8"/><path d="M-4 .3-1.2 3.2 4-3"/>',
    "partly": '<circle r="7" class="open"/><path d="M0-7A7 7 0 0 0 0 7z" class="full"/>',
    "does not hold": '<circle r="8"/><path d="M-3-3 3 3M3-3-3 3"/>',
    "incomplete": '<path d="M-6 7V2M0 7V-7M6 7V-2" class="bars"/>',
    "too small to judge": '<circle r="7" class="open"/><path d="M-4 0h.1M0 0h.1M4 0h.1" class="dots"/>',
}
# For counts: "3 hold".
PLURALS = {"holds": "hold", "does not hold": "do not hold", "incomplete": "are incomplete"}
KINDS = {"training": "training run", "evaluation": "evaluation", "comparison": "comparison"}


def write_report(results: Sequence[dict[str, Any]], out: Path, title: str | None = None) -> Path:
    """Write the report of `results` to `out`, and their numbers to `out` with the suffix .json.

    results: of `command.find_results`, or dictionaries as in result.json. One that cannot be shown is a ReportError, a
    kind of ValueError, which names it. title: None for a default.
    """
    checked = checked_all(results)
    if title is None:
        title = TITLE if any(kind_of(result) == "experiment" for result in checked) else RUNS_TITLE
    numbers = numbers_file(out)
    if numbers.is_file() and not _is_report(numbers):
        raise ReportError(
            f"{numbers} would be overwritten by the numbers of the page, and is no such file: choose another --out"
        )
    page = page_html(checked, title)
    write_whole(
        numbers, json.dumps({"title": title, "results": checked}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return write_whole(out, page)


def numbers_file(out: Path) -> Path:
    """The JSON file beside the page `out`."""
    if not out.name or out.suffix == ".json":
        raise ReportError(f"the page must have a name that ends with .html, got {str(out)!r}")
    return out.with_suffix(".json")


def _is_report(file: Path) -> bool:
    try:
        return set(read_json(file)) == {"title", "results"}
    except UnreadableFile:
        return False


def page_html(results: Sequence[dict[str, Any]], title: str = TITLE) -> str:
    """The whole page, from checked results."""
    names = _anchors(results)
    style = style_sheet() + (files(__package__) / "page.css").read_text(encoding="utf-8")
    sections = "\n".join(
        (_section if _is_experiment(result) else _run_section)(result, name)
        for result, name in zip(results, names, strict=True)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
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
<footer><p>Made by <code>lucid report</code>. The same numbers are in the JSON file beside this page.
{_spreads(results)}</p></footer>
</body>
</html>
"""


def _anchors(results: Sequence[dict[str, Any]]) -> list[str]:
    """An id for each section: its name, with a number if another section has the name."""
    anchors: list[str] = []
    for number, result in enumerate(results):
        plain = "".join(
            letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "-" for letter in result["name"]
        )
        name = plain or "experiment"
        if name in anchors:
            name = f"{name}-{number + 1}"
        while name in anchors:
            name += "-"
        anchors.append(name)
    return anchors


def _spreads(results: Sequence[dict[str, Any]]) -> str:
    """The meaning of a spread, for each kind of result that has spreads."""
    kinds = set(map(kind_of, results))
    texts = {"experiment": "standard deviations over seeds", "evaluation": "standard errors over samples"}
    spreads = [f"{text} ({kind}s)" for kind, text in texts.items() if kind in kinds]
    return f"Spreads are {' and '.join(spreads)}." if spreads else ""


def _is_experiment(result: dict[str, Any]) -> bool:
    return kind_of(result) == "experiment"


def _header(results: Sequence[dict[str, Any]], title: str) -> str:
    experiments = [result for result in results if _is_experiment(result)]
    measured = _verdicts(experiments) if experiments else ""
    return f"""<header>
<h1>{escape(title)}</h1>
<p class="lead">LUCID attention reads like softmax attention, but stores corrections instead of values: what each value
adds to what the memory already answers for its key.</p>
<div class="formula">
<span><i>O</i> = softmax(<i>QK</i><sup>⊤</sup>/√<i>D</i> + causal) <b><i>P</i><sup>−1</sup></b> <i>V</i></span>
<span><b><i>P</i><sub>ij</sub></b> = exp(√<i>D</i> (cos <i>θ</i><sub>ij</sub> − 1)), <i>j</i> ≤ <i>i</i></span>
</div>{measured}
</header>"""


def _verdicts(results: Sequence[dict[str, Any]]) -> str:
    """The number of experiments with each verdict; machine, date and duration of the runs."""
    counts = {verdict: sum(result["verdict"] == verdict for result in results) for verdict in VERDICTS}
    tally = "".join(_count(verdict, count) for verdict, count in counts.items() if count)
    facts = [
        ("Machine", _distinct(results, "machine")),
        ("Date", _dates(results)),
        ("Scale", _distinct(results, "scale")),
    ]
    if times := [result["seconds"] for result in results if isinstance(result.get("seconds"), (int, float))]:
        facts.append(("Time", f"{duration(sum(times))} of computing"))
    return f"""
<ul class="tally" aria-label="verdicts">{tally}</ul>
{_facts(facts)}"""


def _facts(facts: Sequence[Sequence[str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _count(verdict: str, count: int) -> str:
    words = PLURALS.get(verdict, verdict) if count > 1 else verdict
    return f'<li class="{_slug(verdict)}">{_icon(verdict)}<b>{count}</b> {words}</li>'


def _overview(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    experiments = [
        f'<tr><th scope="row"><a href="#{name}">{escape(result["title"])}</a></th>'
        f'<td data-label="Paper">{_text(result["paper"])}</td><td data-label="Here">{_text(result["ours"])}</td>'
        f"<td>{_chip(result['verdict'])}</td></tr>"
        for result, name in zip(results, names, strict=True)
        if _is_experiment(result)
    ]
    runs = [
        f'<tr><th scope="row"><a href="#{name}">{escape(result["title"])}</a></th>'
        f'<td data-label="What">{_text(result["about"])}</td><td data-label="Result">{_text(result["ours"])}</td>'
        f'<td class="kind">{KINDS[kind_of(result)]}</td></tr>'
        for result, name in zip(results, names, strict=True)
        if not _is_experiment(result)
    ]
    tables = _overview_table(("Claim", "Paper", "Here", "Verdict"), experiments)
    tables += _overview_table(("Run", "What", "Result", "Kind"), runs)
    return f"""<section class="overview" aria-labelledby="overview">
<h2 id="overview">At a glance</h2>
{tables}
</section>"""


def _overview_table(columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return f"<table><thead><tr>{head}</tr>\n</thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _section(result: dict[str, Any], name: str) -> str:
    command = result["command"]
    figures, tables = _figures(result, command, name), _tables(result)
    seeds = result.get("seeds")
    facts = [f"scale {result['scale']}", duration(result.get("seconds"))]
    if seeds is not None:
        facts.append(f"{shown(seeds)} seed{'' if seeds == 1 else 's'}")
    facts = [f'<span class="together">{escape(fact)}</span>' for fact in [*facts, result["finished"]]]
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
{_rule(result)}
</div>
<div class="figures">{figures}</div>
</div>
{tables}
<div class="made"><p>Made by</p>{command_html(command)}<p>{" · ".join(facts)}</p>
<p><a href="#overview">Back to the overview</a></p></div>
</section>"""


def _rule(result: dict[str, Any]) -> str:
    """The version of the rule of the verdict, and its changes; results of before 2026-11-18 do not name it."""
    rule = result.get("rule")
    return f'<p class="rule">Rule of the verdict: {_text(str(rule))}.</p>' if rule else ""


def _run_section(result: dict[str, Any], name: str) -> str:
    """A training run, an evaluation or a comparison."""
    return f"""<section class="run" id="{name}" aria-labelledby="{name}-title">
<h2 id="{name}-title"><span>{escape(result["title"])}</span><span class="kind">{KINDS[kind_of(result)]}</span></h2>
<p class="about">{_text(result["about"])}</p>
<p class="because"><strong>{_text(result["ours"])}</strong></p>
{_facts(result["facts"]) if result["facts"] else ""}
<div class="figures">{_figures(result, "", name)}</div>
{_tables(result)}
<div class="made"><p><a href="#overview">Back to the overview</a></p></div>
</section>"""


def _figures(result: dict[str, Any], command: str, name: str) -> str:
    return "".join(
        figure_html(figure, command, f"{name}-{number}") for number, figure in enumerate(result["figures"], 1)
    )


def _tables(result: dict[str, Any]) -> str:
    tables = "".join(f'<div class="table">{table_html(table)}</div>' for table in result["tables"])
    return f'<div class="tables">{tables}</div>' if tables else ""


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
