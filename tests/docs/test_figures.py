"""The committed pictures show what the code computes: the numbers beside each are computed
again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.helpers import load_script

DOCS = Path(__file__).resolve().parents[2] / "docs"


figures = load_script("hgms_docs_figures", DOCS / "figures.py")


@pytest.mark.extended
@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_numbers_on_file_are_those_of_a_new_run(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        numbers, draw = figures.FIGURES[name]()
    finally:
        torch.set_num_threads(threads)
    assert figures.differences(name, numbers) == []
    assert draw(figures.rounded(numbers)).axes


def test_every_number_made_another_is_noticed() -> None:
    numbers = json.loads((figures.IMAGES / "ridge.json").read_text())
    numbers["error"]["1e-02"][3][1] *= 1.001
    del numbers["ridge"][0]
    lines = figures.differences("ridge", numbers)
    assert [line.split(":")[0] for line in lines] == ["ridge.ridge", "ridge.error.1e-02[3][1]"]


def test_every_picture_is_shown_on_the_page_and_every_file_has_its_maker() -> None:
    page = (DOCS / "explanation" / "counterexamples.md").read_text(encoding="utf-8")
    for name in figures.FIGURES:
        assert f"](../images/{name}.svg)" in page
        assert (figures.IMAGES / f"{name}.svg").is_file()
    assert {path.stem for path in figures.IMAGES.glob("*.json")} == set(figures.FIGURES)


def test_the_page_says_the_calls_of_the_runs() -> None:
    page = (DOCS / "explanation" / "counterexamples.md").read_text(encoding="utf-8")
    for name, curve in json.loads((figures.IMAGES / "kink-methods.json").read_text())[
        "methods"
    ].items():
        assert re.search(rf"`{name}`[^|]*\| {curve['calls']:,} \|", page), name
