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
from support.run_folders import write_comparison

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


DRAWN = """element => [
    ...element.querySelectorAll('.scatterlayer .js-line, .barlayer .point path')]
    .filter(path => (path.getAttribute('d') || '').length > 10).length"""


def test_the_plots_are_drawn_without_a_complaint_or_a_request(browser: Any, tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "runs")
    file = report.write(report.build([folder]), tmp_path / "report.html")
    page = browser.new_page(reduced_motion="reduce")
    messages: list[str] = []
    requests = {file.as_uri()}
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(f"error: {error}"))
    page.on("request", lambda request: requests.add(request.url))
    page.goto(file.as_uri())
    plots = page.locator(".plot").all()
    for plot in plots:  # they are drawn when they come near
        plot.scroll_into_view_if_needed()
        plot.locator(".main-svg").first.wait_for(state="attached", timeout=20_000)
    assert (len(plots), all(plot.evaluate(DRAWN) for plot in plots)) == (16, True)
    outside = [url for url in requests if not url.startswith(("data:", "blob:"))]
    assert (messages, outside) == ([], [file.as_uri()])
    page.close()
