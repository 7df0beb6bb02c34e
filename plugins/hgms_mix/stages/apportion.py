"""Convert weights to row counts.

Counts are whole numbers with an exact total, within the capacity of each source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from hgms.arguments import require


def apportion(
    weights: Mapping[str, float], capacity: Mapping[str, int], size: int
) -> dict[str, int]:
    """Return row counts per source by Hamilton's method of largest remainders.

    No count exceeds the capacity of its source.

    With quotas q_s = size · ω_s / Σω, each source first gets ⌊q_s⌋ rows. The sources with the
    largest remainders q_s − ⌊q_s⌋ then get one more row each, until the total is ``size``. If a
    quota is at least the capacity of its source, the missing rows are apportioned to the other
    sources. The arithmetic is exact (fractions). Equal remainders go to the larger weight, then to
    the name that sorts first.

    A source of weight zero provides no rows.

    Raises
    ------
    ConfigError
        Weights are negative, not finite or all zero, or the sources have fewer rows in total than
        ``size``.

    Examples
    --------
    >>> apportion({"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 100, "b": 100, "c": 100}, 11)
    {'a': 6, 'b': 3, 'c': 2}
    >>> apportion({"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 1, "b": 100, "c": 100}, 11)
    {'a': 1, 'b': 6, 'c': 4}
    """
    for name, weight in weights.items():
        require(
            math.isfinite(weight) and weight >= 0,
            "wrong-value",
            f"the weight {weight} of source {name!r} must be finite and at least 0",
            place=("weights", name),
        )
    shares = {name: Fraction(weights[name]) for name in sorted(weights) if weights[name] > 0}
    require(
        shares,
        "wrong-value",
        "at least one weight must be greater than 0, but there is none (sources: "
        f"{', '.join(sorted(weights)) or 'none'})",
        place=("weights",),
    )
    counts = dict.fromkeys(weights, 0)
    available = sum(capacity[name] for name in shares)
    require(
        size <= available,
        "too-few-rows",
        f"size={size} exceeds the {available} rows of the sources with a weight "
        f"({', '.join(f'{name} {capacity[name]}' for name in shares)})",
        place=("sample", "size"),
        hint=f"decrease size to {available} or less, or add rows",
    )
    left = size
    open_shares = dict(shares)
    while full := [
        name
        for name, share in open_shares.items()
        if left * share >= capacity[name] * sum(open_shares.values())
    ]:
        for name in full:
            counts[name] = capacity[name]
            left -= capacity[name]
            del open_shares[name]
        if not open_shares:
            break
    return counts | _largest_remainders(open_shares, left)


def _largest_remainders(shares: Mapping[str, Fraction], size: int) -> dict[str, int]:
    total = sum(shares.values())
    quotas = {name: size * share / total for name, share in shares.items()}
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    order = sorted(quotas, key=lambda name: (counts[name] - quotas[name], -shares[name], name))
    for name in order[: size - sum(counts.values())]:
        counts[name] += 1
    return counts
