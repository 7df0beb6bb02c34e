"""Intervals against SciPy's own."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from hgms_core.statistics import Interval

VALUES = [0.91, 0.88, 0.93, 0.90, 0.89]


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_interval_is_the_t_interval(level: float) -> None:
    low, high = stats.t.interval(level, len(VALUES) - 1, loc=sum(VALUES) / 5, scale=stats.sem(VALUES))
    found = Interval.of(VALUES, level)
    assert found.mean - found.half_width == pytest.approx(low, rel=1e-12)
    assert found.mean + found.half_width == pytest.approx(high, rel=1e-12)


def test_one_value_has_no_interval() -> None:
    assert math.isnan(Interval.of([0.5]).half_width)
    assert str(Interval.of([0.5])) == "0.500 (n = 1)"
    assert math.isnan(Interval.of([]).mean)
    assert Interval.of([1.0, 3.0]).scaled(100).mean == 200
