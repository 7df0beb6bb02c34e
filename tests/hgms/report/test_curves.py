"""Curves, bands and axes of a report's figures."""

from __future__ import annotations

import numpy as np

from hgms.report import curves
from hgms.results.statistics import Interval


def test_a_band_is_the_interval_over_runs_that_hold_their_last_value() -> None:
    lines = []
    for seed in range(5):
        random = np.random.default_rng(seed)
        x = np.concatenate([[0.0], np.cumsum(random.uniform(0.5, 1.5, size=300 + 50 * seed))])
        lines.append((x, random.normal(size=x.size)))
    curve, thinned = (curves.band(lines, points=points) for points in (10_000, 400))
    assert curve is not None
    assert curve.x[-1] == max(x[-1] for x, _ in lines)
    held = [Interval.of([y[x <= at][-1] for x, y in lines]) for at in curve.x]
    np.testing.assert_allclose(curve.y, [it.mean for it in held])
    np.testing.assert_allclose(curve.low, [it.mean - it.half_width for it in held])
    np.testing.assert_allclose(curve.high, [it.mean + it.half_width for it in held])
    # a thinned band has no point of its own
    assert thinned is not None
    assert len(thinned.x) <= 400
    at = np.searchsorted(curve.x, thinned.x)
    for name in ("x", "y", "low", "high"):
        np.testing.assert_array_equal(getattr(thinned, name), getattr(curve, name)[at])


def test_what_was_not_reported_has_no_curve_and_one_run_no_band() -> None:
    empty, x = np.empty(0), np.arange(3.0)
    assert curves.band([]) is curves.band([(empty, empty)]) is None
    alone = curves.band([(x, x)])
    assert alone is not None
    assert alone.low is None


def test_a_mean_mixture_holds_what_runs_last_reported() -> None:
    first = np.array([1.0, 2.0, 4.0]), np.array([[0.5, 0.25, 0.0], [0.5, 0.75, 1.0]])
    second = np.array([1.5, 3.0]), np.array([[0.5, 1.0], [0.5, 0.0]])
    x, y = curves.together([first, second])
    np.testing.assert_array_equal(x, [1.5, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(y, [[0.5, 0.375, 0.625, 0.5], [0.5, 0.625, 0.375, 0.5]])
