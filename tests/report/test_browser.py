"""The report in a real browser: it shows every figure, fetches nothing, logs nothing and fits a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lucid_lab.report.command import find_results
from lucid_lab.report.page import write_report
from lucid_lab.report.palette import ROLES

from .breaking import all_results
from .browser import Browser, opened
from .test_runs import write_evaluation, write_run

WINDOWS = {
    "desktop, light": (1280, 900, "light"),
    "desktop, dark": (1280, 900, "dark"),
    "phone, light": (390, 844, "light"),
    "phone, dark": (390, 844, "dark"),
}
FIGURES = """
[...document.querySelectorAll("figure")].map(figure => [...figure.querySelectorAll("svg.plot")].map(plot => {
    const box = plot.getBoundingClientRect()
    const drawn = [...plot.querySelectorAll("path, image, use")].map(each => each.getBoundingClientRect())
    const letters = [...plot.querySelectorAll("text")].map(
        each => parseFloat(getComputedStyle(each).fontSize) * plot.getScreenCTM().a)
    return {
        width: box.width,
        height: box.height,
        marks: drawn.filter(each => each.width + each.height > 0).length,
        smallest: Math.min(...letters),
        label: plot.getAttribute("aria-label"),
    }
}))
"""
# Elements that stick out of the window, except inside boxes that scroll.
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(each =>
    !each.parentElement.closest(".scroll, pre") && each.getClientRects().length &&
    (each.getBoundingClientRect().right > WIDTH + 1 || each.getBoundingClientRect().left < -1)
).map(each => each.outerHTML.slice(0, 200))
"""
COLOURS = """({
    ground: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    lucid: getComputedStyle(document.querySelector('.legend .lucid path')).stroke,
    strokes: [...new Set([...document.querySelectorAll('svg.plot path')].map(each => getComputedStyle(each).stroke))],
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as started:
        yield started


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_every_figure_is_drawn_and_the_browser_logs_nothing(
    window: tuple[int, int, str], browser: Browser, report: Path
) -> None:
    browser.open(report, *window)
    assert browser.complaints() == []
    assert browser.requests() == [report.resolve().as_uri()]
    figures = browser.run(FIGURES)
    expected = [figure for result in all_results() for figure in result["figures"]]
    assert len(figures) == len(expected)
    for plots, figure in zip(figures, expected, strict=True):
        assert len(plots) == len(figure.get("panels", [])) or figure["kind"] != "heatmaps"
        assert plots
        for plot in plots:
            assert plot["width"] >= 150
            assert plot["height"] >= 40
            assert plot["marks"] >= 3
            assert plot["smallest"] >= 10
            assert figure["title"] in plot["label"]


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_the_page_never_scrolls_sideways(window: tuple[int, int, str], browser: Browser, report: Path) -> None:
    browser.open(report, *window)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= window[0]
    assert browser.run(OUTSIDE.replace("WIDTH", str(window[0]))) == []


def test_light_and_dark_differ_in_the_page_and_in_its_drawings(browser: Browser, report: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(report, 1280, 900, scheme)
        seen[scheme] = browser.run(COLOURS)
    light, dark = seen["light"], seen["dark"]
    assert light["lucid"] == rgb(ROLES["lucid"].light)
    assert dark["lucid"] == rgb(ROLES["lucid"].dark)
    for role in ROLES.values():
        assert rgb(role.light) in light["strokes"]
        assert rgb(role.dark) in dark["strokes"]
    assert light["ground"] != dark["ground"]
    assert light["ink"] != dark["ink"]
    # The light page is light, and the dark page is dark.
    assert sum(map(int, light["ground"][4:-1].split(","))) > 600 > 150 > sum(map(int, dark["ground"][4:-1].split(",")))


def test_texts_from_results_stay_texts(browser: Browser, report: Path) -> None:
    browser.open(report, 1280, 900, "light")
    assert browser.run("document.scripts.length") == 0
    assert browser.run("document.images.length") == 0
    assert browser.run("document.title") == "LUCID attention: what holds, measured"
    assert browser.run("document.querySelectorAll('main > section.experiment').length") == len(all_results())


def test_the_numbers_of_a_figure_are_behind_a_click(browser: Browser, report: Path) -> None:
    browser.open(report, 390, 844, "light")
    visible = "document.querySelector('figure details table').checkVisibility()"
    assert not browser.run(visible)
    browser.run("document.querySelector('figure details summary').click()")
    assert browser.run(visible)
    missing = (
        "[...document.querySelectorAll('figure details')].filter(each => !each.querySelector('table, pre.matrix'))"
    )
    assert browser.run(f"{missing}.length") == 0


def test_a_click_in_the_overview_leads_to_the_section(browser: Browser, report: Path) -> None:
    browser.open(report, 1280, 900, "light")
    links = "[...document.querySelectorAll('.overview a')]"
    assert browser.run(f"{links}.length") == len(all_results())
    assert browser.run(f"{links}.every(each => document.querySelector(each.hash).matches('section'))")


FAULTS = {
    "an error of a script": "<script>undefined.x</script>",
    "a message": "<script>console.warn('careful')</script>",
    "an exception": "<script>throw new Error('stop')</script>",
    "a picture that is not there": "<img src='missing.png'>",
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_browser_notices(fault: str, browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{fault}")
    browser.open(page, 390, 844, "light")
    assert browser.complaints()


def test_the_browser_notices_what_is_fetched_and_what_is_too_wide(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><link rel=stylesheet href='http://localhost:9/x.css'><div style='width:700px'>wide</div>"
    )
    browser.open(page, 390, 844, "light")
    assert "http://localhost:9/x.css" in browser.requests()
    assert browser.run("document.documentElement.scrollWidth") > 390
    assert len(browser.run(OUTSIDE.replace("WIDTH", "390"))) == 1


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_a_page_of_training_runs_and_evaluations_fits_the_window(
    window: tuple[int, int, str], browser: Browser, tmp_path: Path
) -> None:
    for name in ("lucid", "softmax"):
        write_run(tmp_path / name, name)
        write_evaluation(tmp_path / "scores" / name, name, name)
    page = write_report(find_results([tmp_path]), tmp_path / "page.html")
    browser.open(page, *window)
    browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= window[0]
    assert browser.run(OUTSIDE.replace("WIDTH", str(window[0]))) == []
    assert all(plots for plots in browser.run(FIGURES))
    # No word of the overview is broken into letters.
    assert browser.run("Math.min(...[...document.querySelectorAll('.overview .kind')].map(e => e.offsetWidth))") >= 60
