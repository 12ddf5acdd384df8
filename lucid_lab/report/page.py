"""The report: an overview, then a section for each result. One file without scripts that fetches nothing."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lucid_attention.files import write_whole

from .figures import draw, shown, tables_of
from .records import VERDICTS, Result, checked, read_results

TITLE = "LUCID attention: what holds, measured"
# The title of a page without experiments.
RUNS_TITLE = "LUCID attention: training runs and evaluations"
# What a browser may do with the page: its own styles, and pictures inside the page. No scripts, nothing from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
# Signs tell the verdicts apart without colour.
SIGNS = dict(zip(VERDICTS, "✓◐✗…?", strict=True))
KINDS = {"training": "training run", "evaluation": "evaluation", "analysis": "analysis", "comparison": "comparison"}
# Rows of the tables of a line figure, on the page and in Markdown.
PAGE_ROWS, MARKDOWN_ROWS = 60, 12
# Characters with a meaning in Markdown or HTML.
SPECIAL = {sign: f"\\{sign}" for sign in "\\`*_[]|#~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": " ", "\r": " "}
# A figure of a shape that cannot be drawn fails with one of these.
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


def write_files(paths: Sequence[Path], out: Path | None, markdown_file: Path | None, title: str | None) -> None:
    """`lucid report`: write the page, the Markdown, or both, and print what they show. Without both: report.html."""
    results = read_results(paths)
    if markdown_file is not None:
        if out is not None and markdown_file.resolve() == out.resolve():
            raise ValueError(f"--markdown must be another file than the page, got {str(markdown_file)!r}")
        print(write_whole(markdown_file, markdown(results, title or "Results")))
    if out is not None or markdown_file is None:
        counts = Counter(result["kind"] for result in results)
        shown_counts = ", ".join(f"{kind} {count}" for kind, count in counts.items())
        print(f"{write_report(results, out or Path('report.html'), title)}: {shown_counts}")
    for result in results:
        if result["kind"] == "damaged":
            print(f"lucid report: not shown: {result['error']}", file=sys.stderr)


def write_report(results: Sequence[Result], out: Path, title: str | None = None) -> Path:
    """Write the page of `results` to `out`. results: of `read_results`, or dictionaries as in result.json."""
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"the page must have a name that ends with .html, got {str(out)!r}")
    return write_whole(out, page_html(results, title))


def page_html(results: Sequence[Result], title: str | None = None) -> str:
    """The whole page. Equal results give equal pages."""
    return _rendered("page.html", results, title, autoescape=True)


def _rendered(template: str, results: Sequence[Result], title: str | None, autoescape: bool) -> str:
    import jinja2

    if not results:
        raise ValueError("results must hold at least one result, got none")
    sections = [checked(result, f"results[{number}]") for number, result in enumerate(results)]
    for number, section in enumerate(sections, 1):
        drawings = [_drawn(figure, pictures=autoescape) for figure in section.get("figures", [])]
        section |= {"anchor": f"result-{number}", "drawings": drawings}
    experiments = [section for section in sections if section["kind"] == "experiment"]
    environment = jinja2.Environment(autoescape=autoescape, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"shown": shown, "typeset": typeset, "duration": duration, "plain": plain}
    folder = files(__package__)
    page = environment.from_string((folder / template).read_text(encoding="utf-8")).render(
        title=title or (TITLE if experiments else RUNS_TITLE),
        policy=POLICY,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        experiments=experiments,
        runs=[section for section in sections if section["kind"] in KINDS],
        damaged=[section for section in sections if section["kind"] == "damaged"],
        signs=SIGNS,
        kinds=KINDS,
    )
    # Blank lines have no meaning beyond the first, in HTML and in Markdown.
    return re.sub(r"\n{3,}", "\n\n", page.strip()) + "\n"


def _drawn(figure: dict[str, Any], pictures: bool) -> dict[str, Any]:
    """A figure with its pictures and the tables of its numbers, or with the reason why it has none."""
    drawn: dict[str, Any] = {"figure": figure, "pictures": [], "tables": [], "error": ""}
    try:
        tables = tables_of(figure, PAGE_ROWS if pictures else MARKDOWN_ROWS)
        return drawn | {"tables": tables, "pictures": draw(figure) if pictures else []}
    except MALFORMED as error:
        return drawn | {"error": f"{type(error).__name__}: {error}"}


def typeset(text: str) -> str:
    """Minus signs for hyphens before numbers; no line break between a number and its spread or percent sign."""
    text = re.sub(r"(?<![^\s(\[,;:/→])-(?=\d)", "−", text)
    return text.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")


def duration(seconds: Any) -> str:
    """`43 s`, `5 min 12 s`, `2 h 3 min`."""
    if not isinstance(seconds, int | float):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def markdown(results: Sequence[Result], title: str = "Results") -> str:
    """The tables of the results as a Markdown page, without pictures."""
    return _rendered("page.md", results, title, autoescape=False)


def plain(text: Any) -> str:
    """The text with the characters escaped that have a meaning in Markdown or HTML."""
    return "".join(SPECIAL.get(character, character) for character in str(text).strip())
