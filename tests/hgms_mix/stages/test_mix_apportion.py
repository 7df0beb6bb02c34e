"""Counts from weights: checked against the definition, by every property that it promises."""

from __future__ import annotations

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects

from hgms_core import ConfigError
from hgms_mix.stages.apportion import apportion

NAMES = tuple("abcdefgh")


@st.composite
def portfolios(draw: st.DrawFn) -> tuple[dict[str, float], dict[str, int], int]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    weight = st.one_of(
        st.just(0.0), st.floats(1e-300, 1.0), st.sampled_from([0.1, 0.2, 0.25, 0.5, 1.0])
    )
    weights = {name: draw(weight) for name in names}
    if not any(weights.values()):
        weights[names[0]] = draw(st.floats(1e-3, 1.0))
    capacity = {name: draw(st.integers(0, 60)) for name in names}
    room = sum(capacity[name] for name in names if weights[name] > 0)
    return weights, capacity, draw(st.integers(0, room))


@settings(max_examples=60, deadline=None)
@given(portfolios(), st.randoms())
def test_totals_are_exact_and_sources_with_room_stay_in_proportion_in_any_order(
    portfolio: tuple[dict[str, float], dict[str, int], int], random
) -> None:
    """What is not full is within one row of its quota of what the full ones leave; what is full
    was owed at least that much.
    """
    weights, capacity, size = portfolio
    counts = apportion(weights, capacity, size)
    assert sum(counts.values()) == size
    assert all(0 <= counts[name] <= capacity[name] for name in counts)
    assert all(counts[name] == 0 for name in counts if weights[name] == 0)
    roomy = [name for name in weights if weights[name] > 0 and counts[name] < capacity[name]]
    left = sum(counts[name] for name in roomy)
    total = sum(Fraction(weights[name]) for name in roomy)
    for name in roomy:
        assert abs(counts[name] - left * Fraction(weights[name]) / total) < 1
    for full, other in itertools.product(set(weights) - set(roomy), roomy):
        if weights[full] > 0:
            # within the one row of rounding, a full source is not given more a weight than one with
            # room
            owed = Fraction(weights[full]) * (counts[other] + 1) / Fraction(weights[other])
            assert counts[full] - 1 < owed
    names = list(weights)
    random.shuffle(names)
    turned = {name: capacity[name] for name in sorted(names)}
    assert apportion({name: weights[name] for name in names}, turned, size) == counts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 50))
def test_counts_are_the_nearest_to_the_quotas(parts: list[int], size: int) -> None:
    """Of all counts of the right total, by Σ (count − quota)²: what largest remainders minimise."""
    weights = {NAMES[i]: part / 64 for i, part in enumerate(parts)}  # exact in binary
    counts = apportion(weights, dict.fromkeys(weights, size + 1), size)
    quotas = [Fraction(size * part, sum(parts)) for part in parts]
    around = [(quota.__floor__(), quota.__floor__() + 1) for quota in quotas]

    def distance(shares: tuple[int, ...]) -> Fraction:
        return sum((count - quota) ** 2 for count, quota in zip(shares, quotas, strict=True))

    least = min(distance(each) for each in itertools.product(*around) if sum(each) == size)
    assert (sum(counts.values()), distance(tuple(counts.values()))) == (size, least)


def test_too_few_rows_and_weights_that_are_none_are_refused() -> None:
    weights = {"clean": 0.5, "noisy": 0.5, "other": 0.0}
    with rejects("too-few-rows", "sample", "size", of=ConfigError):
        apportion(weights, {"clean": 3, "noisy": 4, "other": 9}, 8)
    with rejects("wrong-value", "weights", "a", of=ConfigError):
        apportion({"a": float("nan"), "b": 1.0}, {"a": 9, "b": 9}, 1)
