"""The page "Scale": its tables are those that benchmarks/scale.py computes, and the model has
the limits that it must have.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    return scale


def test_the_tables_of_the_page_are_those_of_the_script(scale: ModuleType) -> None:
    shown = scale.PAGE.read_text().partition(scale.BEGIN)[2].partition(scale.END)[0]
    assert shown.strip() == scale.tables().strip()
