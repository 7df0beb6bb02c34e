"""What methods learned of the weights of named data sources, and what a step cost in tokens: for
runs whose rows hold ``weight.<source>`` and ``step_forward_tokens``, ``step_backward_tokens``.
Other runs are not read any further.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from hgms.report.curves import together
from hgms.results import Interval, StoredRun
from hgms.uncertainty import Certainty, over_seeds

PREFIX = "weight."
TOKENS = ("step_forward_tokens", "step_backward_tokens")
_EQUAL = 1e-6  # weights of equal logits differ by the rounding of a softmax in float32 at most


@frozen(kw_only=True, eq=False)
class Mixture:
    """One method's mixture. ``finals`` are what its runs returned, in the order of ``sources``;
    ``over_time`` is the mean over them, ``[source, point]``, at the points ``x``; ``prior`` are the
    weights that they began with, empty where that is not known."""

    sources: tuple[str, ...]
    finals: Mapping[StoredRun, tuple[float, ...]]
    x: np.ndarray
    over_time: np.ndarray
    prior: tuple[float, ...] = ()

    @functools.cached_property
    def weights(self) -> dict[str, Interval]:
        """Mean final weight by source, the largest first."""
        columns = zip(self.sources, zip(*self.finals.values(), strict=True), strict=True)
        means = {source: Interval.of(values) for source, values in columns}
        return dict(sorted(means.items(), key=lambda item: -item[1].mean))

    @functools.cached_property
    def certainty(self) -> Certainty:
        """Intervals of the weights over the seeds, and tests against the prior."""
        runs = [dict(zip(self.sources, weights, strict=True)) for weights in self.finals.values()]
        equal = (1 / len(self.sources),) * len(self.sources)
        return over_seeds(runs, dict(zip(self.sources, self.prior or equal, strict=True)))

    @property
    def uniform(self) -> bool:
        """Whether every run ended with equal weights."""
        equal = 1 / len(self.sources)
        return all(
            abs(weight - equal) <= _EQUAL for weights in self.finals.values() for weight in weights
        )

    @property
    def moves(self) -> bool:
        """Whether there is anything to draw: a uniform or fixed mixture stays as it is."""
        return bool((np.ptp(self.over_time, axis=1) > _EQUAL).any())

    @property
    def leaders(self) -> Counter[str]:
        """How many runs ended with which source as their largest."""
        return Counter(self.sources[int(np.argmax(weights))] for weights in self.finals.values())


def wanted(run: StoredRun) -> list[str]:
    """The columns of a run that this module needs; none for a run without named sources."""
    return [name for name in run.fields() if name.startswith(PREFIX) or name in TOKENS]


def mixture(rows: Mapping[StoredRun, Mapping[str, Any]], axis: str, points: int) -> Mixture | None:
    """Of one method's runs; None where none of them has named sources."""
    sources = tuple(
        dict.fromkeys(
            name for columns in rows.values() for name in columns if name.startswith(PREFIX)
        )
    )
    finals: dict[StoredRun, tuple[float, ...]] = {}
    lines: list[tuple[np.ndarray, np.ndarray]] = []
    begun: list[np.ndarray] = []
    for run, columns in rows.items():
        if not sources or not all(name in columns for name in sources):
            continue
        table = np.stack([columns[name] for name in sources])
        known = ~np.isnan(table).any(0) & ~np.isnan(columns[axis])
        if known.any():
            table = table[:, known]
            finals[run] = tuple(table[:, -1].tolist())
            begun += [table[:, 0]] if known[0] else []  # the row of the start
            lines.append((columns[axis][known], table))
    if not lines:
        return None
    x, over_time = together(lines, points)
    names = tuple(name.removeprefix(PREFIX) for name in sources)
    prior = tuple(np.mean(begun, axis=0).tolist()) if begun else ()
    return Mixture(sources=names, finals=finals, x=x, over_time=over_time, prior=prior)


def tokens(rows: Mapping[StoredRun, Mapping[str, Any]]) -> dict[StoredRun, tuple[float, float]]:
    """Mean forward and backward tokens of a step, by run; runs without such columns are left
    out.
    """
    means = {}
    for run, table in rows.items():
        columns = [table[name][~np.isnan(table[name])] for name in TOKENS if name in table]
        if len(columns) == len(TOKENS) and all(column.size for column in columns):
            forward, backward = (float(column.mean()) for column in columns)
            means[run] = (forward, backward)
    return means


def spell_mixture(mixture: Mixture, top: int = 3) -> str:
    """The largest sources with their mean weights, as the paper's tables write them.

    >>> over_time = np.array([[0.25], [0.75]])
    >>> spell_mixture(
    ...     Mixture(
    ...         sources=("a", "b"), finals={None: (0.25, 0.75)}, x=np.zeros(1), over_time=over_time
    ...     )
    ... )
    'b 0.750; a 0.250'
    """
    if mixture.uniform:
        return f"uniform, each {1 / len(mixture.sources):.3f}"
    return "; ".join(
        f"{source} {spell_weight(interval)}"
        for source, interval in list(mixture.weights.items())[:top]
    )


def spell_weight(interval: Interval) -> str:
    """Three decimals, as in the paper."""
    spread = "" if math.isnan(interval.half_width) else f" ± {interval.half_width:.3f}"
    return f"{interval.mean:.3f}{spread}"


def prominent(mixtures: Sequence[Mixture], most: int) -> list[str]:
    """The ``most`` sources that matter in any mixture at any time, in their own order: a picture
    has so many colours.
    """
    peaks: dict[str, float] = {}
    for mixture in mixtures:
        for source, peak in zip(mixture.sources, mixture.over_time.max(1).tolist(), strict=True):
            peaks[source] = max(peaks.get(source, 0.0), peak)
    kept = set(sorted(peaks, key=lambda source: -peaks[source])[:most])
    return [source for source in peaks if source in kept]
