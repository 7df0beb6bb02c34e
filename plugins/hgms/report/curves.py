"""Curves over seeds: mean and 95 % band on a common, thinned grid.

Few points keep pages with many curves small.

A run is a step function: it keeps its last reported value until the next report, and after its end.
At every kept point the mean and the band are exact. Thinning only selects the points.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from hgms.results import t_quantile

POINTS = 400

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
    grid, held = _hold_values(lines, points)
    n = len(lines)
    mean = (held / n).sum(0)
    if n < 2:
        return Curve(grid, mean)
    with np.errstate(over="ignore", invalid="ignore"):  # a band that overflows a double has no ends
        half = t_quantile(n - 1, 1 - level) * held.std(0, ddof=1) / n**0.5
        return Curve(grid, mean, mean - half, mean + half, n)


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
    grid, held = _hold_values(lines, points)
    return grid, held.mean(0)


def _hold_values(lines: Sequence[Line], points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most ``points`` places at which a run reports, and each run's value there.

    The values have shape ``[run, grid]``.
    """
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[grid >= max(x[0] for x, _ in lines)]
    if len(grid) > points:
        grid = grid[np.linspace(0, len(grid) - 1, points).round().astype(int)]
    return grid, np.stack([y[..., np.searchsorted(x, grid, side="right") - 1] for x, y in lines])
