"""The report's page in a real headless Chromium: `pytest -m nightly` on this file.

HGMS_CHROMIUM names the executable where it is not on the PATH as chromium, chromium-browser or
google-chrome.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.made_runs import write_comparison, write_mixtures

import hgms.report as report

pytestmark = pytest.mark.nightly

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_comparison(tmp_path_factory.mktemp("runs"))
    return report.write(report.build([folder]), tmp_path_factory.mktemp("out") / "report.html")[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    names = (os.environ.get("HGMS_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    executable = next((path for name in names if name and (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("no Chromium on the PATH; name one with HGMS_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield launched
        launched.close()


class Opened:
    """A page with everything it complained about and everything it asked for."""

    def __init__(self, browser: Any, path: Path, viewport: dict[str, int], scheme: str) -> None:
        self.context = browser.new_context(
            viewport=viewport, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: self.messages.append(f"{message.type}: {message.text}")
        )
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def draw_all(self) -> None:
        """Scrolls through the page, as a reader does: plots are drawn when they come near."""
        plots = self.page.locator(".plot")
        for number in range(plots.count()):
            plots.nth(number).scroll_into_view_if_needed()
            plots.nth(number).locator(".main-svg").first.wait_for(state="attached", timeout=20_000)


@pytest.fixture
def open_page(browser: Any, page_file: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def opening(viewport: dict[str, int] = WIDE, scheme: str = "light") -> Opened:
        pages.append(Opened(browser, page_file, viewport, scheme))
        return pages[-1]

    yield opening
    for page in pages:
        page.context.close()


def until(page: Any, expression: str, argument: object = None) -> None:
    """Playwright's own wait_for_function needs eval, which the page forbids."""
    ends = time.monotonic() + 20
    while not page.evaluate(expression, argument):
        assert time.monotonic() < ends, expression
        page.wait_for_timeout(50)


def test_the_plots_are_drawn_without_a_complaint_or_a_request(
    open_page: Any, page_file: Path
) -> None:
    opened = open_page()
    opened.draw_all()
    page = opened.page
    assert page.locator(".plot").count() == 16
    for number in range(16):
        plot = page.locator(".plot").nth(number)
        shapes = plot.evaluate(
            """element => [
                    ...element.querySelectorAll('.scatterlayer .js-line, .barlayer .point path')]
                .map(path => path.getAttribute('d') || '').filter(d => d.length > 10).length"""
        )
        assert shapes > 0, plot.get_attribute("id")
    # a band and a line for each of the four methods
    assert page.locator("#plot-0-0 .js-line").count() == 8
    assert (
        page.locator("#plot-0-0 .js-fill").evaluate_all(
            "paths => paths.filter(p => p.getAttribute('d').length > 10).length"
        )
        == 4
    )
    assert opened.messages == []
    assert {url for url in opened.requests if not url.startswith(("data:", "blob:"))} == {
        page_file.as_uri()
    }


def test_hover_and_zoom(open_page: Any) -> None:
    page = open_page().page
    area = page.locator("#plot-0-0 .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#plot-0-0 .hoverlayer text").first.wait_for(timeout=10_000)
    hover = page.locator("#plot-0-0 .hoverlayer").text_content()
    assert "hg-ms" in hover
    before = page.evaluate("document.getElementById('plot-0-0')._fullLayout.xaxis.range")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9, steps=8)
    page.mouse.up()
    until(
        page,
        (
            "before => Math.abs(document.getElementById('plot-0-0')._fullLayout.xaxis.range[0] - "
            "before[0]) > 0.1"
        ),
        before,
    )
    after = page.evaluate("document.getElementById('plot-0-0')._fullLayout.xaxis.range")
    assert after[1] - after[0] < 0.6 * (before[1] - before[0])


def test_a_click_on_a_method_hides_it_in_every_plot_of_its_section(open_page: Any) -> None:
    opened = open_page()
    opened.draw_all()
    page = opened.page
    button = page.locator("#task-0 .legend button", has_text="hg-ms")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    shown = (
        "id => document.getElementById(id)._fullData.filter(t => t.visible === true && "
        "t.name === 'hg-ms').length"
    )
    assert page.evaluate(shown, "plot-0-0") == page.evaluate(shown, "plot-0-1") == 0
    assert page.evaluate(shown, "plot-1-0") == 2
    button.click()
    assert page.evaluate(shown, "plot-0-0") == 2


def test_zoom_to_the_end_shows_the_ends_of_the_curves_that_are_shown(open_page: Any) -> None:
    opened = open_page()
    opened.draw_all()
    page = opened.page
    button = page.locator("#task-0 figure:has(#plot-0-0) .zoom")
    axis = "document.getElementById('plot-0-0')._fullLayout.yaxis.range"
    whole = page.evaluate(axis)
    assert whole[0] <= 0 < 1 < whole[1]
    button.click()
    low, high = page.evaluate(axis)
    assert 0 < low < 0.1
    assert 0.6 < high < 0.8
    page.locator("#task-0 .legend button", has_text="lost").click()
    assert 0.4 < page.evaluate(axis)[1] < 0.5
    button.click()
    assert page.evaluate(axis) == whole


def test_sorting_by_click_and_by_key_both_ways(open_page: Any) -> None:
    page = open_page().page
    table = page.locator("#task-0-results table")
    head = table.locator("thead th").nth(1)
    cells = "table => [...table.tBodies[0].rows].map(row => row.cells[1].textContent.trim())"

    def numbers() -> list[float]:
        return [float(text.split()[0]) for text in table.evaluate(cells)]

    assert head.get_attribute("aria-sort") is None
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert numbers() == sorted(numbers())
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert numbers() == sorted(numbers(), reverse=True)
    table.locator("thead th").first.locator("button").click()
    assert head.get_attribute("aria-sort") is None
    names = table.evaluate(
        "table => [...table.tBodies[0].rows].map(row => row.cells[0].textContent.trim())"
    )
    assert names == sorted(names)
    # what is missing stays last, whichever way
    difference = table.locator("thead th").nth(2).locator("button")
    for _ in range(2):
        difference.click()
        assert (
            table.evaluate("table => table.tBodies[0].rows[3].cells[2].textContent.trim()") == "–"
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(open_page: Any, scheme: str) -> None:
    opened = open_page(PHONE, scheme)
    opened.draw_all()
    page = opened.page
    for details in page.locator("details").all():
        details.evaluate("element => element.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.body.scrollWidth") <= PHONE["width"]
    # a wide table scrolls in its own box
    assert page.locator("#task-0-pairs .scroll").evaluate(
        "box => box.scrollWidth > box.clientWidth"
    )
    for plot in page.locator(".plot .main-svg").all():
        assert plot.bounding_box()["width"] <= PHONE["width"]
    assert opened.messages == []


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_mixtures_are_drawn_as_areas(
    browser: Any, tmp_path: Path, viewport: dict[str, int], scheme: str
) -> None:
    folder = write_mixtures(tmp_path / "runs", sources=10)
    [path] = report.write(report.build([folder], separate=True), tmp_path / "report.html")
    opened = Opened(browser, path, viewport, scheme)
    opened.draw_all()
    page = opened.page
    plot = page.locator(
        "#task-0 figure", has=page.locator("h3", has_text="Mixture over time")
    ).locator(".plot")
    assert plot.count() == 2
    for number in range(2):
        fills = plot.nth(number).locator(".scatterlayer .js-fill")
        # seven sources have a colour, the others are one area
        assert (
            fills.evaluate_all("paths => paths.filter(p => p.getAttribute('d').length > 10).length")
            == 8
        )
        assert "source-0" in (plot.nth(number).locator(".legend").text_content() or "")
    heights = page.evaluate(
        "[...document.querySelectorAll('#ledgers tr.group td')].map(e => "
        "getComputedStyle(e).borderTopWidth)"
    )
    assert set(heights) == {"2px"}
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert opened.messages == []
    opened.context.close()


def test_headings_and_regions_have_names(open_page: Any) -> None:
    page = open_page().page
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    unnamed = page.evaluate(
        """[...document.querySelectorAll('section, nav, [role=region], [role=group], [role=img]')]
            .filter(e => !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby'))
            .length"""
    )
    assert unnamed == 0
    idents = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(idents) == len(set(idents))
    targets = page.evaluate(
        "[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href').slice(1))"
    )
    assert set(targets) <= set(idents)
