"""The report's page in a real headless Chromium: `pytest -m nightly` on this file.

HGMS_CHROMIUM names the executable where it is not on the PATH as chromium, chromium-browser or
google-chrome.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_runs import write_comparison

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
        settings = {"viewport": viewport, "color_scheme": scheme, "reduced_motion": "reduce"}
        self.page = browser.new_page(**settings)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        # plots are drawn when they come near
        for plot in self.page.locator(".plot").all():
            plot.scroll_into_view_if_needed()
            plot.locator(".main-svg").first.wait_for(state="attached", timeout=20_000)


DRAWN = """element => [
    ...element.querySelectorAll('.scatterlayer .js-line, .barlayer .point path')]
    .filter(path => (path.getAttribute('d') || '').length > 10).length"""


@pytest.mark.parametrize(("viewport", "scheme"), [(WIDE, "light"), (PHONE, "dark")])
def test_the_plots_are_drawn_without_a_complaint_or_a_request_and_fit_the_screen(
    browser: Any, page_file: Path, viewport: dict[str, int], scheme: str
) -> None:
    opened = Opened(browser, page_file, viewport, scheme)
    page = opened.page
    drawn = [plot.evaluate(DRAWN) for plot in page.locator(".plot").all()]
    assert (len(drawn), min(drawn) > 0) == (16, True)
    # a band and a line for each of the four methods
    assert page.locator("#plot-0-0 .js-line").count() == 8
    assert opened.messages == []
    outside = {url for url in opened.requests if not url.startswith(("data:", "blob:"))}
    assert outside == {page_file.as_uri()}
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    page.close()


def test_a_click_on_a_method_hides_it_in_every_plot_of_its_section_and_on_a_heading_sorts(
    browser: Any, page_file: Path
) -> None:
    page = Opened(browser, page_file, WIDE, "light").page
    button = page.locator("#task-0 .legend button", has_text="hg-ms")
    shown = (
        "id => document.getElementById(id)._fullData.filter(t => t.visible === true && "
        "t.name === 'hg-ms').length"
    )
    for expected in ([0, 2], [2, 2]):
        button.click()
        assert [page.evaluate(shown, plot) for plot in ("plot-0-0", "plot-1-0")] == expected
    table = page.locator("#task-0-results table")
    head = table.locator("thead th").nth(1)
    cells = "table => [...table.tBodies[0].rows].map(row => row.cells[1].textContent.trim())"
    for order, down in (("ascending", False), ("descending", True)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        numbers = [float(text.split()[0]) for text in table.evaluate(cells)]
        assert numbers == sorted(numbers, reverse=down)
    page.close()
