"""The built site in a real browser. `make docs` builds it and runs this file; `make test` does not collect it.

Every page: no request beyond the site's own files, no complaint in the console, no formula left as LaTeX, and nothing
wider than a phone except what scrolls in its own box.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Browser, opened

ROOT = Path(__file__).parents[1]
SITE = ROOT / "site"
PAGES = sorted(page for page in SITE.rglob("*.html") if page.name != "404.html")
PHONE, DESKTOP = (390, 844), (1280, 900)
WIDE = ["mathematics.html", "results.html", "benchmarks.html", "index.html", "reference/operators.html"]
# Elements that stick out of the window, except inside boxes that scroll or are closed (the menu).
OUTSIDE = """
[...document.querySelectorAll("article *")].filter(each => {
    const box = each.getBoundingClientRect()
    if (box.width === 0 || (box.right <= WIDTH + 1 && box.left >= -1)) return false
    for (let up = each.parentElement; up && up.tagName !== "BODY"; up = up.parentElement)
        if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return false
    return true
}).map(each => each.outerHTML.slice(0, 200))
"""
SCROLLING = """
[...document.querySelectorAll("article table")].filter(table => {
    const scrolls = up => up &&
        (["auto", "scroll"].includes(getComputedStyle(up).overflowX) || scrolls(up.parentElement))
    return table.getBoundingClientRect().width > WIDTH && !scrolls(table.parentElement)
}).length
"""
GROUND = "getComputedStyle(document.body).backgroundColor"
INK = "getComputedStyle(document.querySelector('article')).color"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as started:
        yield started


def test_the_site_has_been_built() -> None:
    names = {page.relative_to(SITE).as_posix() for page in PAGES}
    assert names >= {"index.html", "concepts.html", "mathematics.html", "results.html", "reference/commands.html"}
    guides = {file.stem for file in (ROOT / "docs" / "guides").glob("*.md")}
    assert {page.stem for page in (SITE / "guides").glob("*.html")} == guides


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(SITE).as_posix())
def test_the_page_fits_a_phone_and_fetches_nothing(page: Path, browser: Browser) -> None:
    browser.open(page, *PHONE, "light")
    outside = [url for url in browser.requests() if not url.startswith(SITE.resolve().as_uri())]
    assert outside == []
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.run(OUTSIDE.replace("WIDTH", str(PHONE[0]))) == []
    assert browser.run(SCROLLING.replace("WIDTH", str(PHONE[0]))) == 0
    assert "$`" not in browser.run("document.querySelector('article').innerText")


def test_formulas_are_drawn_with_the_font_of_the_site(browser: Browser) -> None:
    browser.open(SITE / "mathematics.html", *DESKTOP, "light")
    sizes = browser.run(
        "[...document.querySelectorAll('math')].map(each => each.getBoundingClientRect())"
        ".map(box => [box.width, box.height])"
    )
    assert len(sizes) > 400
    assert all(width > 2 and height > 4 for width, height in sizes)
    assert browser.run("document.fonts.ready.then(() => document.fonts.check('16px \"STIX Two Math\"'))")
    assert not browser.run("document.querySelectorAll('merror').length")
    # A formula at the start of a line must not end its paragraph.
    texts = browser.run("[...document.querySelectorAll('article p')].map(each => each.innerText.trim())")
    assert [text for text in texts if text.startswith((".", ",", ";", ":", ")"))] == []


@pytest.mark.parametrize("page", WIDE)
def test_light_and_dark_differ(page: str, browser: Browser) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(SITE / page, *DESKTOP, scheme)
        seen[scheme] = browser.run(GROUND), browser.run(INK)
    assert seen["light"][0] != seen["dark"][0]
    assert seen["light"][1] != seen["dark"][1]


@pytest.mark.parametrize("page", ["index.html", "costs.html", "guides/operator.html", "guides/add_a_variant.html"])
def test_code_and_tables_are_not_cut_on_a_laptop(page: str, browser: Browser) -> None:
    browser.open(SITE / page, *DESKTOP, "light")
    boxes = "[...document.querySelectorAll('article pre > code, article .md-typeset__scrollwrap')]"
    cut = f"{boxes}.filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 200))"
    assert browser.run(cut) == []


@pytest.mark.parametrize("word", ["sharpness", "attn_mask", "dropout", "is_causal"])
def test_search_finds_a_page(word: str, browser: Browser) -> None:
    browser.open(SITE / "index.html", *DESKTOP, "light")
    browser.run("document.querySelector('input.md-search__input').focus()")
    browser.run(
        f"(() => {{ const box = document.querySelector('input.md-search__input'); box.value = {word!r};"
        " for (const kind of ['keyup', 'input']) box.dispatchEvent(new Event(kind, {bubbles: true})) })()"
    )
    found = "document.querySelectorAll('.md-search-result__item').length"
    assert browser.run(
        f"new Promise(done => {{ let tries = 0; const look = () => {found} || tries++ > 100 ? done({found}) : "
        "setTimeout(look, 100); look() })"
    )
