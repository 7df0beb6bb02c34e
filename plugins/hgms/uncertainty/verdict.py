"""Uncertainty of a mixture, as numbers and as sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from hgms.store import finite

LEVEL = 0.95


@frozen(kw_only=True)
class Effect:
    """The measured effect of one source, with its interval and p-value.

    ``value`` has the 95 % interval ``low`` to ``high``, on a scale on which ``null`` is no effect.
    ``p`` is the p-value of no effect, after Holm's rule over the sources. NaN ends mean that there
    is no interval.
    """

    source: str
    value: float
    low: float
    high: float
    null: float
    p: float

    @property
    def sign(self) -> int:
        """1: evidence for more of the source than in the prior; −1: for less; 0: no evidence."""
        return 0 if not self.p <= 1 - LEVEL else 1 if self.value > self.null else -1


@frozen(kw_only=True)
class Uncertainty:
    """The effects of all sources, and the p-value of "no source has an effect".

    ``over`` states the variation that the interval covers.
    """

    over: str
    effects: tuple[Effect, ...]
    p: float

    @property
    def evidence(self) -> bool:
        """Whether there is any evidence against the prior."""
        return self.p <= 1 - LEVEL

    def as_dict(self) -> dict[str, Any]:
        """Convert the values for JSON; NaN becomes ``None``."""
        effects = [{**attrs.asdict(effect), "evidence": effect.sign} for effect in self.effects]
        return dict(
            finite({"over": self.over, "p": self.p, "evidence": self.evidence, "sources": effects})
        )

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Uncertainty:
        """Restore an object from the result of :meth:`as_dict`."""
        effects = tuple(
            Effect(
                source=row["source"],
                value=row["value"],
                low=math.nan if row["low"] is None else float(row["low"]),
                high=math.nan if row["high"] is None else float(row["high"]),
                null=row["null"],
                p=row["p"],
            )
            for row in table["sources"]
        )
        return cls(over=table["over"], effects=effects, p=table["p"])


def holm(chances: Sequence[float]) -> list[float]:
    """Compute Holm's step-down p-values.

    The r-th smallest of m p-values is multiplied by m − r + 1, and never falls below the value
    before it. If no source has an effect, the chance that any p-value falls below 0.05 is at most 5
    %.

    Notes
    -----
    Source: Holm (1979), *A simple sequentially rejective multiple test procedure*, Scandinavian
    Journal of Statistics 6.

    Examples
    --------
    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted = [1.0] * len(chances)
    highest = 0.0
    for rank, position in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[position]))
        adjusted[position] = highest
    return adjusted


def over_sources(chances: Sequence[float]) -> list[float]:
    """Compute the p-values of a mixture's sources after Holm's rule.

    With two sources, more of the first is less of the second. This is a single test, so there is no
    correction.

    Examples
    --------
    >>> over_sources([0.03, 0.03]), over_sources([0.01, 0.01, 0.5])
    ([0.03, 0.03], [0.03, 0.03, 0.5])
    """
    return list(chances) if len(chances) == 2 else holm(chances)


def in_words(uncertainty: Uncertainty, prior: str = "") -> str:
    """Describe the uncertainty in one sentence.

    ``prior`` is the name of a non-uniform prior.

    Examples
    --------
    >>> effects = (
    ...     Effect(source="a", value=0.7, low=0.6, high=0.8, null=0.5, p=0.003),
    ...     Effect(source="b", value=0.4, low=0.2, high=0.6, null=0.5, p=0.4),
    ... )
    >>> in_words(Uncertainty(over="5 seeds", effects=effects, p=0.003))
    'over 5 seeds: evidence for more of a (p = 0.003); b cannot be told from the prior (uniform)'
    >>> in_words(Uncertainty(over="5 seeds", effects=effects[1:], p=0.4))
    'over 5 seeds: no evidence against the prior (uniform), p = 0.40'
    """
    against = f"the prior ({prior})" if prior else "the prior (uniform)"
    more, less, rest = (
        [effect for effect in uncertainty.effects if effect.sign == sign] for sign in (1, -1, 0)
    )
    if not uncertainty.evidence:
        return f"over {uncertainty.over}: no evidence against {against}, {chance(uncertainty.p)}"
    if not (more or less):
        return (
            f"over {uncertainty.over}: evidence against {against}, {chance(uncertainty.p)}, but of "
            "no single source can be said whether more or less of it"
        )
    parts = [
        f"{word} of {join_names(f'{effect.source} ({chance(effect.p)})' for effect in some)}"
        for word, some in (("more", more), ("less", less))
        if some
    ]
    evidence = f"over {uncertainty.over}: evidence for {', '.join(parts)}"
    return evidence + (
        f"; {join_names(effect.source for effect in rest)} cannot be told from {against}"
        if rest
        else ""
    )


def join_names(names: Iterable[str]) -> str:
    """Join names for a sentence.

    Examples
    --------
    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def chance(p: float) -> str:
    """Format a p-value with two digits.

    Examples
    --------
    >>> chance(0.0002), chance(0.0312), chance(0.5)
    ('p < 0.001', 'p = 0.031', 'p = 0.50')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
