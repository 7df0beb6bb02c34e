"""The committed pictures show what the code computes: the numbers beside each are computed
again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.helpers import load_script

DOCS = Path(__file__).resolve().parents[2] / "docs"


figures = load_script("hgms_docs_figures", DOCS / "figures.py")


@pytest.mark.extended
@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_numbers_on_file_are_those_of_a_new_run(name: str) -> None:
    numbers, draw = figures.FIGURES[name]()
    assert figures.differences(name, numbers) == []
    assert draw(figures.rounded(numbers)).axes


def test_every_number_made_another_is_noticed() -> None:
    numbers = json.loads((figures.IMAGES / "ridge.json").read_text())
    numbers["error"]["1e-02"][3][1] *= 1.001
    del numbers["ridge"][0]
    lines = figures.differences("ridge", numbers)
    assert [line.split(":")[0] for line in lines] == ["ridge.ridge", "ridge.error.1e-02[3][1]"]


def test_every_picture_is_on_the_page_with_the_calls_of_the_runs_and_has_its_maker() -> None:
    page = (DOCS / "explanation" / "counterexamples.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\]\(\.\./images/([\w-]+)\.svg\)", page))
    on_file = [{path.stem for path in figures.IMAGES.glob(f"*.{end}")} for end in ("json", "svg")]
    assert on_file[0] == set(figures.FIGURES) <= shown & on_file[1]
    methods = json.loads((figures.IMAGES / "kink-methods.json").read_text())["methods"]
    for name, curve in methods.items():
        assert re.search(rf"`{name}`[^|]*\| {curve['calls']:,} \|", page), name
