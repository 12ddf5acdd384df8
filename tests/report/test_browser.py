"""The report in a real browser: it shows every picture, fetches nothing, logs nothing and fits a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lucid_lab.report.page import write_report
from lucid_lab.report.records import read_results

from .browser import Browser, opened
from .samples import memory_update, nasty, needle_grid, write_analysis, write_evaluation, write_json, write_training

WINDOWS = {
    "desktop, light": (1280, 900, "light"),
    "desktop, dark": (1280, 900, "dark"),
    "phone, light": (390, 844, "light"),
    "phone, dark": (390, 844, "dark"),
}
# Elements that stick out of the window, except inside boxes that scroll.
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(each =>
    !each.parentElement.closest(".scroll, pre") && each.getClientRects().length &&
    (each.getBoundingClientRect().right > WIDTH + 1 || each.getBoundingClientRect().left < -1)
).map(each => each.outerHTML.slice(0, 200))
"""
PICTURES = "[...document.images].map(e => [e.complete && e.naturalWidth, e.getBoundingClientRect().width, e.alt])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of everything."""
    folder = tmp_path_factory.mktemp("report")
    for made in (memory_update(), needle_grid(), nasty()):
        write_json(folder / str(len(made["title"])) / "result.json", made)
    for name, accuracy in (("lucid", 0.75), ("softmax", 0.5)):
        write_training(folder / name, name)
        write_evaluation(folder / name / "results.json", name, accuracy)
    write_analysis(folder / "analysis.json")
    return write_report(read_results([folder]), folder / "report.html")


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_every_picture_is_shown_nothing_is_fetched_and_the_page_never_scrolls_sideways(
    window: tuple[int, int, str], browser: Browser, report: Path
) -> None:
    browser.open(report, *window)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.complaints() == []
    assert browser.requests() == [report.resolve().as_uri()]
    pictures = browser.run(PICTURES)
    assert len(pictures) >= 20
    for natural, width, alt in pictures:
        assert width >= 150
        # Letters of 12 pixels stay at least 9.5 pixels high.
        assert width >= 0.79 * natural
        assert alt
    assert browser.run("document.documentElement.scrollWidth") <= window[0]
    assert browser.run(OUTSIDE.replace("WIDTH", str(window[0]))) == []
    assert browser.run("document.scripts.length") == 0
    missing = (
        "[...document.querySelectorAll('figure')].filter(e => e.querySelector('img') && !e.querySelector('table, pre'))"
    )
    assert browser.run(f"{missing}.length") == 0


def test_light_and_dark_differ_in_the_page_and_in_its_pictures(browser: Browser, report: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(report, 1280, 900, scheme)
        style = "getComputedStyle(document.body).backgroundColor, getComputedStyle(document.images[0]).filter"
        seen[scheme] = browser.run(f"[{style}]")
    (light, plain), (dark, inverted) = seen["light"], seen["dark"]
    assert sum(map(int, light[4:-1].split(","))) > 600 > 150 > sum(map(int, dark[4:-1].split(",")))
    assert plain == "none"
    assert "invert" in inverted


def test_a_click_opens_the_numbers_and_links_lead_to_sections(browser: Browser, report: Path) -> None:
    browser.open(report, 390, 844, "light")
    visible = "document.querySelector('figure details table').checkVisibility()"
    assert not browser.run(visible)
    browser.run("document.querySelector('figure details summary').click()")
    assert browser.run(visible)
    links = "[...document.querySelectorAll('.overview a')]"
    assert browser.run(f"{links}.length") == 10
    assert browser.run(f"{links}.every(each => document.querySelector(each.hash).matches('section'))")
