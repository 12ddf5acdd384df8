"""The page is one sound file: complete, escaped, with unique ids, and the same bytes every time."""

import json
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from lucid_lab.report.drawing import SENTINELS
from lucid_lab.report.page import page_html, write_report
from lucid_lab.report.records import checked

from .breaking import NASTY, nasty
from .samples import needle_grid, result

VOID = {"meta", "link", "br", "img"}


class Outline(HTMLParser):
    """Tags, ids, references, texts; and whether tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("href", "xlink:href", "src"):
                self.addresses.append(value or "")
            self.addresses += re.findall(r"url\(([^)]*)\)", value or "")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def results() -> list[dict[str, Any]]:
    return [checked(each, "here") for each in (needle_grid(), nasty(), result("needle_grid"))]


@pytest.fixture(scope="module")
def page() -> str:
    return page_html(results())


def test_the_page_has_all_texts_of_every_result(page: str) -> None:
    text = Outline(page).text.replace("\u00a0", " ")
    for each in results():
        for key in ("title", "claim", "paper", "ours", "because", "command", "machine", "finished"):
            assert each[key] in text, key
        for figure in each["figures"]:
            assert figure["title"] in text
        # The command is in the section and with every figure; the verdict in the overview and in the section.
        assert text.count(each["command"]) >= 1 + len(each["figures"])
        assert text.count(each["verdict"]) >= 2
    for cell in ("closes the gap: what is missing is the neighbour", "99.1 ± 0.7", "65536"):
        assert cell in text


def test_texts_cannot_become_markup(page: str) -> None:
    outline = Outline(page)
    assert outline.tags["script"] == outline.tags["img"] == 0
    assert outline.tags["title"] == 1 + outline.tags["svg"] - page.count('aria-hidden="true"')
    assert NASTY in outline.text
    assert NASTY not in page


def test_the_browser_may_run_no_script_and_fetch_nothing(page: str) -> None:
    """The policy stands before everything that it rules, and allows what the page uses: styles and data: pictures."""
    match = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert match is not None
    assert match.start() < page.index("<title>") < page.index("<style>")
    policy = dict(rule.strip().split(" ", 1) for rule in match[1].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["style-src"] == "'unsafe-inline'"
    assert policy["img-src"] == "data:"
    assert "script-src" not in policy


def test_ids_are_unique_and_every_reference_is_in_the_page(page: str) -> None:
    outline = Outline(page)
    assert [each for each, count in outline.ids.items() if count > 1] == []
    for address in outline.addresses:
        assert address.startswith(("#", "data:")), address
        assert not address.startswith("#") or address[1:] in outline.ids, address
    # Two results of one name have two sections.
    assert outline.ids["needle_grid"] == outline.ids["needle_grid-3"] == 1


def test_drawings_take_their_colours_from_the_page(page: str) -> None:
    for sentinel in SENTINELS.values():
        assert sentinel not in page
    assert "var(--gsa)" in page
    assert "'DejaVu Sans'" not in page
    assert len(re.findall(r"<text[^>]*var\(--sans\)", page)) == page.count("<text") > 100


def test_the_same_results_give_the_same_bytes_whatever_the_reader_set(page: str) -> None:
    mine = {"font.size": 30, "svg.fonttype": "path", "axes.labelsize": 30, "lines.linewidth": 9, "svg.hashsalt": None}
    with matplotlib.rc_context(mine):
        again = page_html(results())
        assert matplotlib.rcParams["font.size"] == 30
    assert again == page


def test_the_numbers_lie_beside_the_page_as_json(tmp_path: Path) -> None:
    made = result("a", figures=[], tables=[{"title": "t", "columns": ["a"], "rows": [[float("nan")], [float("inf")]]}])
    out = write_report([made], tmp_path / "new" / "folder" / "page.html", title="A & B")
    assert out == tmp_path / "new" / "folder" / "page.html"
    assert "<title>A &amp; B</title>" in out.read_text()
    kept = json.loads(out.with_suffix(".json").read_text())
    assert kept["title"] == "A & B"
    (one,) = kept["results"]
    assert one["tables"][0]["rows"] == [[None], [None]]
    assert {key: one[key] for key in made if key != "tables"} == {key: made[key] for key in made if key != "tables"}
    assert sorted(each.name for each in out.parent.iterdir()) == ["page.html", "page.json"]


def test_a_failure_leaves_the_old_page_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_report([result("a")], tmp_path / "page.html")
    before = [file.read_text() for file in (out, out.with_suffix(".json"))]
    with pytest.raises(ValueError, match=r"results\[1\].*verdict"):
        write_report([result("b"), result("c", verdict="fine")], out)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_report([result("b")], out)
    assert [file.read_text() for file in (out, out.with_suffix(".json"))] == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["page.html", "page.json"]


def test_nothing_to_report_and_a_name_for_the_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"\.html"):
        write_report([result("a")], tmp_path / "page.json")


def test_machines_dates_scales_and_counts_stand_at_the_top() -> None:
    made = [
        result("a", finished="2026-11-16", machine="one", seconds=40),
        result("b", finished="2026-11-02", machine="two", scale="paper", seconds=50),
        result("c", verdict="does not hold", machine="one", seconds=None),
    ]
    page = page_html(made)
    header = unescape(re.sub("<[^>]+>", " ", page[page.index("<header") : page.index("</header")]))
    text = " ".join(header.split())
    for part in ("2 hold", "1 does not hold", "one; two", "2026-11-02 to 2026-11-16", "small; paper", "1 min 30 s"):
        assert part in text
