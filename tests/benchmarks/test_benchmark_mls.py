"""The table of MLS-Bench's protocol: its own examples, and the published figures beside it."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from support.helpers import load_script

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "mls" / "table.py"


def test_the_published_figures_are_means_over_seeds() -> None:
    table = load_script("mls_table", SCRIPT)
    assert doctest.testmod(table) == (0, 2)
    figure = table.published()["mls-linear", "v-pbgd"]
    assert (figure.count, figure.mean) == (3, pytest.approx(90.10, abs=0.005))
