"""Curves over seeds: mean and 95 % band on a common, thinned grid.

Few points keep pages with many curves small.

A run is a step function: it keeps its last reported value until the next report, and after its end.
At every kept point the mean and the band are exact. Thinning only selects the points. It keeps both
ends, and the lowest and the highest point of each bucket, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

POINTS = 400
# points at which a band is evaluated before thinning; a page cannot show more distinct points
_GRID = 4000

Line = tuple[np.ndarray, np.ndarray]
"""One run's curve: x, which is not decreasing, and y."""


@frozen(eq=False)
class Curve:
    """A mean with its band.

    ``low`` and ``high`` are ``None`` for a single run, which has no interval.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    runs: int = 1

    @property
    def percent(self) -> Curve:
        """Convert a share to percent; the band ends at the limits of a share."""
        low, high = (
            None if side is None else 100 * np.clip(side, 0, 1) for side in (self.low, self.high)
        )
        return Curve(self.x, 100 * self.y, low, high, self.runs)


def band(lines: Sequence[Line], points: int = POINTS, level: float = 0.95) -> Curve | None:
    """Compute the mean over runs with its t-interval; ``None`` if there are no reports.

    The curve starts when all runs have started, and ends with the last run.

    Examples
    --------
    >>> import numpy as np
    >>> first = (np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    >>> second = (np.array([0.0, 1.0, 2.0]), np.array([0.0, 4.0, 6.0]))
    >>> band([first, second]).y  # at 2.0 the first run holds its 2.0
    array([0., 3., 4.])
    """
    lines = [(x, y) for x, y in lines if x.size]
    if not lines:
        return None
    grid, held = _hold_values(lines)
    n = len(lines)
    mean = (held / n).sum(0)
    if n < 2:
        keep = thin(mean, points)
        return Curve(grid[keep], mean[keep])
    from scipy.special import stdtrit

    with np.errstate(over="ignore", invalid="ignore"):  # a band that overflows a double has no ends
        half = float(stdtrit(n - 1, 0.5 + level / 2)) * held.std(0, ddof=1) / n**0.5
        low = mean - half
        high = mean + half
    has_ends = not (np.isnan(low).all() or np.isnan(high).all())
    ends = np.array([np.nanargmin(low), np.nanargmax(high)] if has_ends else [], dtype=int)
    keep = np.union1d(thin(mean, points - 2), ends)
    return Curve(grid[keep], mean[keep], low[keep], high[keep], n)


def together(lines: Sequence[Line], points: int = POINTS) -> Line:
    """Compute the mean over runs of several values reported together.

    ``y`` has the axes ``[value, x]``.

    All values use the same points, so their sum is the same as in each run.

    Examples
    --------
    >>> import numpy as np
    >>> first = (np.array([0.0, 1.0]), np.array([[0.5, 0.2], [0.5, 0.8]]))
    >>> together([first, (np.array([0.0]), np.array([[0.1], [0.9]]))])
    (array([0., 1.]), array([[0.3 , 0.15],
           [0.7 , 0.85]]))
    """
    held = [_hold_values([(x, y[row]) for x, y in lines]) for row in range(lines[0][1].shape[0])]
    grid = held[0][0]
    keep = np.linspace(0, len(grid) - 1, min(points, len(grid))).round().astype(int)
    return grid[keep], np.stack([values.mean(0)[keep] for _, values in held])


def bin_values(lines: Sequence[Line], bins: int = 60) -> Curve | None:
    """Compute the median and middle half of the values of all runs together.

    They are computed over intervals of x of equal length.

    Use it for noise around a trend, such as a residual. The result is ``None`` if there are no
    reports.

    Examples
    --------
    >>> import numpy as np
    >>> curve = bin_values([(np.arange(4.0), np.array([1.0, 3.0, 10.0, 30.0]))], bins=2)
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
    """Select at most ``points`` indices.

    The indices are both ends, and the lowest and the highest value of each of equal buckets between
    them.

    Examples
    --------
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


def _hold_values(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """Return a grid of the points at which any run reports, and each run's value there.

    The values have shape ``[run, grid]``.
    """
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[grid >= max(x[0] for x, _ in lines)]
    if len(grid) > _GRID:
        grid = grid[np.linspace(0, len(grid) - 1, _GRID).round().astype(int)]
    return grid, np.stack([y[np.searchsorted(x, grid, side="right") - 1] for x, y in lines])
