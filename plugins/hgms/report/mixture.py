"""Learned weights of named data sources.

The module uses runs with rows that contain ``weight.<source>``. For other runs it reads no columns.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from hgms.config.tables import group_values
from hgms.report.curves import together
from hgms.results import Interval, StoredRun
from hgms.uncertainty import Uncertainty, over_seeds

PREFIX = "weight."
_EQUAL = 1e-6  # maximum error of weights of equal logits by a float32 softmax


@frozen(kw_only=True, eq=False)
class Mixture:
    """One method's mixture.

    ``finals`` contains the results of its runs, in the order of ``sources``. ``over_time`` is the
    mean over the runs, ``[source, point]``, at the points ``x``. ``prior`` contains the start
    weights, and is empty if they are unknown.
    """

    sources: tuple[str, ...]
    finals: Mapping[StoredRun, tuple[float, ...]]
    x: np.ndarray
    over_time: np.ndarray
    prior: tuple[float, ...] = ()

    @functools.cached_property
    def weights(self) -> dict[str, Interval]:
        """The mean final weight by source, largest first."""
        columns = zip(self.sources, zip(*self.finals.values(), strict=True), strict=True)
        means = {source: Interval.of(values) for source, values in columns}
        return dict(sorted(means.items(), key=lambda item: -item[1].mean))

    @functools.cached_property
    def uncertainty(self) -> Uncertainty:
        """The intervals of the weights over the seeds, and tests against the prior."""
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
        """Whether the mixture changes; a uniform or fixed mixture is not drawn."""
        return bool((np.ptp(self.over_time, axis=1) > _EQUAL).any())

    @property
    def leaders(self) -> Counter[str]:
        """Count the runs by the source with the largest final weight."""
        return Counter(self.sources[int(np.argmax(weights))] for weights in self.finals.values())


def mixture(rows: Mapping[StoredRun, Mapping[str, Any]], axis: str, points: int) -> Mixture | None:
    """Compute the mixture of one method's runs; ``None`` if no run has named sources."""
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
    return Mixture(
        sources=names,
        finals=finals,
        x=x,
        over_time=over_time,
        prior=tuple(np.mean(begun, axis=0).tolist()) if begun else (),
    )


def spell_mixture(mixture: Mixture) -> str:
    """Format the three largest sources with their mean weights.

    The format is the same as in the paper's tables.

    Examples
    --------
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
        for source, interval in list(mixture.weights.items())[:3]
    )


def spell_weight(interval: Interval) -> str:
    """Format a weight with three decimals, as in the paper."""
    spread = "" if math.isnan(interval.half_width) else f" ± {interval.half_width:.3f}"
    return f"{interval.mean:.3f}{spread}"


def prominent(mixtures: Sequence[Mixture], most: int) -> list[str]:
    """Return the ``most`` sources with the largest weights, in their order.

    A source is ranked by its largest weight in any mixture at any time.

    A picture has a limited number of colours.
    """
    peaks = group_values(
        pair
        for mixture in mixtures
        for pair in zip(mixture.sources, mixture.over_time.max(1).tolist(), strict=True)
    )
    kept = set(sorted(peaks, key=lambda source: -max(0.0, *peaks[source]))[:most])
    return [source for source in peaks if source in kept]
