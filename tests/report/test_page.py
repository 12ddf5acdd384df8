"""The page and the Markdown: texts stay texts, and every figure has a picture and its numbers."""

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lucid_lab import cli
from lucid_lab.report.figures import ROLES, colour_of, draw, write_png
from lucid_lab.report.page import POLICY, markdown, page_html

from .samples import NASTY, memory_update, nasty, needle_grid, write_json

RESULTS = [memory_update(), needle_grid(), nasty()]


def svg(source: str) -> str:
    kind, _, content = source.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def test_markup_in_a_result_is_shown_as_text() -> None:
    page = page_html(RESULTS, title=NASTY)
    assert "<script" not in page
    assert "<img src=http" not in page
    assert page.count("&lt;script&gt;") >= 10
    assert f'content="{POLICY}"'.replace("'", "&#39;") in page
    text = markdown(RESULTS, NASTY)
    assert "<script" not in text
    assert "\\|" in markdown([memory_update() | {"ours": "a|b"}])


def test_equal_results_give_equal_pages_and_different_ones_do_not() -> None:
    assert page_html(RESULTS) == page_html(RESULTS)
    assert page_html(RESULTS[:1]) != page_html(RESULTS[1:2])


def test_every_picture_is_an_svg_with_its_texts_and_an_alternative_text() -> None:
    for made in RESULTS[:2]:
        for figure in made["figures"]:
            pictures = draw(figure)
            assert len(pictures) == len(figure.get("groups", figure.get("panels", [0])))
            for picture in pictures:
                ElementTree.fromstring(svg(picture["source"]))
                assert figure["title"] in picture["alt"]
    (lines,) = draw(memory_update()["figures"][2])
    drawn = svg(lines["source"])
    for text in ("LUCID", "softmax again", "accuracy, %", "trained here", ROLES["lucid"][0], ROLES["softmax"][0]):
        assert text in drawn
    # The ticks of lengths are the lengths themselves.
    assert all(f">{tick}<" in drawn for tick in (64, 128, 256))


def test_a_figure_that_cannot_be_drawn_says_so_and_the_others_are_drawn() -> None:
    page = page_html([nasty()])
    assert page.count("This figure cannot be drawn") == 1
    assert page.count('<img src="data:image/svg+xml') == 4


def test_the_numbers_of_every_figure_are_in_tables() -> None:
    page = page_html(RESULTS[:2])
    assert page.count("<figure") == page.count("<details>") == 5
    for number in ("16.3\u00a0±\u00a02.6", "98.10\u00a0±\u00a00.40", "99.5", "Dashed lines: chance 1.6."):
        assert number in page
    # A large map is text.
    assert page.count('<pre class="matrix"') == 1
    text = markdown(RESULTS[:2])
    for line in ("| softmax | 83.1 ± 2.6 | 16.3 ± 2.6 |", "98.10 ± 0.40", "| 2 | 100 | 99.5 |", "| none | – |"):
        assert line in text


def test_every_role_has_its_colour_and_a_new_one_always_the_same() -> None:
    assert len({colour_of(role) for role in ROLES}) == len(ROLES)
    assert colour_of("something new") == colour_of("something new")
    assert re.fullmatch("#[0-9a-f]{6}", colour_of("something new"))


@pytest.mark.parametrize(
    "figure", [figure for made in RESULTS[:2] for figure in made["figures"]], ids=lambda f: f["title"]
)
def test_a_figure_can_be_a_png(figure: dict[str, object], tmp_path: Path) -> None:
    assert write_png(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_page_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "result.json", memory_update())
    page, text = tmp_path / "new" / "page.html", tmp_path / "page.md"
    assert cli.main(["report", str(tmp_path), "--out", str(page), "--markdown", str(text), "--title", "Mine"]) == 0
    assert f"{page}: experiment 1" in capsys.readouterr().out
    assert "<title>Mine</title>" in page.read_text()
    assert text.read_text().startswith("# Mine\n")
