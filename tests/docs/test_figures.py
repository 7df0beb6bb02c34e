"""The committed pictures show what the code computes: the numbers beside each are computed
again.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.helpers import load_script

DOCS = Path(__file__).resolve().parents[2] / "docs"


figures = load_script("hgms_docs_figures", DOCS / "figures.py")


@pytest.mark.nightly
@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_numbers_on_file_are_those_of_a_new_run(name: str) -> None:
    numbers, draw = figures.FIGURES[name]()
    assert figures.differences(name, numbers) == []
    assert draw(figures.rounded(numbers)).axes


def test_every_picture_is_on_a_page_and_has_its_maker() -> None:
    pages = (DOCS / "explanation").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    shown = set(re.findall(r"\]\(\.\./images/([\w-]+)\.svg\)", text))
    on_file = [{path.stem for path in figures.IMAGES.glob(f"*.{end}")} for end in ("json", "svg")]
    assert on_file[0] == set(figures.FIGURES) <= shown & on_file[1]
