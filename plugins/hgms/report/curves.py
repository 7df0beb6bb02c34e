"""Curves over seeds: mean and 95 % band on a common grid, thinned so that a page with many of them
stays small.

A run is a step function: it holds what it last reported until it reports again, and after its end.
At every kept point the mean and the band are exact; thinning only chooses the points, and it keeps
both ends and, bucket by bucket, the lowest and the highest point, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

POINTS = 400
# points at which a band is evaluated before it is thinned; more could not be told apart on a page
_GRID = 4000

Line = tuple[np.ndarray, np.ndarray]
"""One run's curve: x, not decreasing, and y."""


@frozen(eq=False)
class Curve:
    """``low`` and ``high`` are None for a single run, which has no interval."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    runs: int = 1

    @property
    def percent(self) -> Curve:
        """Of a share: its band ends where shares do."""
        low, high = (
            None if side is None else 100 * np.clip(side, 0, 1) for side in (self.low, self.high)
        )
        return Curve(self.x, 100 * self.y, low, high, self.runs)


def band(lines: Sequence[Line], points: int = POINTS, level: float = 0.95) -> Curve | None:
    """Mean over runs with its t-interval, from where all have begun to where the last one ends;
    None if nothing was reported.

    >>> import numpy as np
    >>> first = (np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    >>> second = (np.array([0.0, 1.0, 2.0]), np.array([0.0, 4.0, 6.0]))
    >>> band([first, second]).y  # at 2.0 the first run holds its 2.0
    array([0., 3., 4.])
    """
    lines = [(x, y) for x, y in lines if x.size]
    if not lines:
        return None
    grid, held = _held(lines)
    n = len(lines)
    mean = (held / n).sum(0)
    if n < 2:
        keep = thin(mean, points)
        return Curve(grid[keep], mean[keep])
    from scipy.special import stdtrit

    with np.errstate(over="ignore", invalid="ignore"):  # a band that no double holds has no ends
        half = float(stdtrit(n - 1, 0.5 + level / 2)) * held.std(0, ddof=1) / n**0.5
        low = mean - half
        high = mean + half
    has_ends = not (np.isnan(low).all() or np.isnan(high).all())
    ends = np.array([np.nanargmin(low), np.nanargmax(high)] if has_ends else [], dtype=int)
    keep = np.union1d(thin(mean, points - 2), ends)
    return Curve(grid[keep], mean[keep], low[keep], high[keep], n)


def together(lines: Sequence[Line], points: int = POINTS) -> Line:
    """The mean over runs of several values reported at once, ``y`` being ``[value, x]``: all at the
    same points, so that they still add up to what they add up to in each run.

    >>> import numpy as np
    >>> first = (np.array([0.0, 1.0]), np.array([[0.5, 0.2], [0.5, 0.8]]))
    >>> together([first, (np.array([0.0]), np.array([[0.1], [0.9]]))])
    (array([0., 1.]), array([[0.3 , 0.15],
           [0.7 , 0.85]]))
    """
    held = [_held([(x, y[row]) for x, y in lines]) for row in range(lines[0][1].shape[0])]
    grid = held[0][0]
    keep = np.linspace(0, len(grid) - 1, min(points, len(grid))).round().astype(int)
    return grid[keep], np.stack([values.mean(0)[keep] for _, values in held])


def binned(lines: Sequence[Line], bins: int = 60) -> Curve | None:
    """Median and middle half of all runs' values together, over equal stretches of x: for what is
    noise around a trend, like a residual. None where nothing was reported.

    >>> import numpy as np
    >>> curve = binned([(np.arange(4.0), np.array([1.0, 3.0, 10.0, 30.0]))], bins=2)
    >>> curve.x, curve.y
    (array([0.5, 2.5]), array([ 2., 20.]))
    """
    x = np.concatenate([x for x, _ in lines]) if lines else np.empty(0)
    y = np.concatenate([y for _, y in lines]) if lines else np.empty(0)
    x = x[np.isfinite(y)]
    y = y[np.isfinite(y)]
    if not x.size:
        return None
    order = np.argsort(x, kind="stable")
    x = x[order]
    y = y[order]
    places = np.unique(x)
    firsts = places[(np.arange(min(bins, len(places))) * len(places)) // min(bins, len(places))]
    parts = list(
        zip(*(np.split(values, np.searchsorted(x, firsts[1:])) for values in (x, y)), strict=True)
    )
    quartiles = np.array([np.percentile(part, (25, 50, 75)) for _, part in parts])
    low, middle, high = quartiles.T
    return Curve(np.array([part.mean() for part, _ in parts]), middle, low, high, len(lines))


def thin(y: np.ndarray, points: int = POINTS) -> np.ndarray:
    """At most ``points`` indices: both ends, and the lowest and the highest of each of equal
    buckets between them.

    >>> thin(np.array([0.0, 1.0, 9.0, 1.0, -5.0, 1.0, 0.0, 0.0]), points=4)
    array([0, 2, 4, 7])
    """
    count = len(y)
    if count <= points:
        return np.arange(count)
    inner = count - 2
    buckets = (points - 2) // 2
    width = -(-inner // buckets)
    padded = np.full(buckets * width, np.nan)
    padded[:inner] = y[1:-1]
    rows = padded.reshape(buckets, width)
    bare = np.isnan(rows)
    start = np.arange(buckets) * width + 1
    low = start + np.where(bare, np.inf, rows).argmin(1)
    high = start + np.where(bare, -np.inf, rows).argmax(1)
    chosen = np.concatenate([[0, count - 1], low, high])
    return np.unique(chosen[chosen < count])


def _held(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """A grid of the points at which any run reports, and what each run holds there, ``[run,
    grid]``.
    """
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[grid >= max(x[0] for x, _ in lines)]
    if len(grid) > _GRID:
        grid = grid[np.linspace(0, len(grid) - 1, _GRID).round().astype(int)]
    return grid, np.stack([y[np.searchsorted(x, grid, side="right") - 1] for x, y in lines])
