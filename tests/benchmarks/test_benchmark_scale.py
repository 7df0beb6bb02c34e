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


def test_a_grid_is_bounded_by_its_largest_term(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scale,
        "MEASURED",
        {
            "load": 0.0,
            "look": 0.0,
            "gather": 0.0,
            "around": 0.5,
            "hand_out": 0.1,
            "latency": 1e-4,
            "large": (8, 1.0),
        },
    )
    assert scale.grid(100, 1.5, 1) == (200.0, "around each run")
    assert scale.grid(100, 1.5, 10)[0] == pytest.approx(20.0)  # ten rounds of two seconds
    # ten a second, however many workers
    assert scale.grid(100, 1.5, 100) == (pytest.approx(10.0), "handing out")
    assert scale.grid(100, 1.5, 100, coordinators=100)[0] == pytest.approx(2.0)
    assert scale.grid(3, 1.5, 2) == (pytest.approx(4.0), "around each run")
    assert scale.grid(3, 4.0, 2)[1] == "the last round"


def test_ranks_go_through_what_was_measured_and_messages_end_what_more_of_them_bring(
    scale: ModuleType,
) -> None:
    one = 2.0
    two = 1.25
    calls = 10
    size = 1e6
    assert scale.step(1, one, two, calls, size) == one
    assert scale.step(2, one, two, calls, size) == two
    # p = 3/4: on four ranks 0.5 + 1.5 / 4, and four messages a call and half as many bytes more
    alpha = scale.MEASURED["latency"] / 2
    rate = scale.MEASURED["large"][0] / (scale.MEASURED["large"][1] - 2 * alpha)
    assert scale.step(4, one, two, calls, size) == pytest.approx(
        0.875 + 10 * 4 * alpha + 0.5 * size / rate
    )
    assert scale.step(4, one, two, calls, size) < two < scale.step(100_000, one, two, calls, size)
