"""Intervals: Wilson's by its defining equation, the bootstrap by resampling again, both by the
paper's table.
"""

from __future__ import annotations

import math
import random

import pytest
from evaluation import bootstrap, wilson
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import rejects

pytestmark = pytest.mark.extended

# Accuracies in percent, as printed in the paper's tables of real-world results.
GSM8K = (
    60.06,
    65.43,
    74.45,
    66.19,
    73.77,
    74.85,
    60.03,
    63.15,
    65.28,
    75.74,
    68.46,
    82.03,
    78.08,
    78.47,
    79.28,
    79.62,
    80.14,
    80.86,
)
MATH = (
    30.24,
    25.89,
    29.93,
    30.58,
    30.49,
    30.86,
    30.26,
    33.40,
    29.24,
    36.93,
    34.27,
    38.98,
    37.29,
    37.35,
    38.00,
    37.98,
    38.23,
    38.48,
)
LARGE_GSM8K = (78.19, 88.4, 86.81, 92.58)
LARGE_MATH = (43.30, 51.29, 46.82, 53.32)


@pytest.mark.parametrize(
    ("accuracies", "count", "printed"),
    [
        (GSM8K, 1319, (2.07, 2.64)),
        (MATH, 4989, (1.22, 1.35)),
        (LARGE_GSM8K, 1319, (1.42, 2.23)),
        (LARGE_MATH, 4989, (1.37, 1.39)),
    ],
    ids=["GSM8K, 7B/9B", "MATH, 7B/9B", "GSM8K, 32B", "MATH, 32B"],
)
def test_the_papers_table_of_uncertainties(
    accuracies: tuple[float, ...], count: int, printed: tuple[float, float]
) -> None:
    intervals = [wilson(round(accuracy * count / 100), count) for accuracy in accuracies]
    widths = [100 * (high - low) / 2 for low, high in intervals]
    assert (round(min(widths), 2), round(max(widths), 2)) == printed


@given(
    st.integers(1, 6000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.sampled_from([0.8, 0.95, 0.99]),
)
def test_the_ends_of_wilsons_interval_solve_its_equation(
    counts: tuple[int, int], level: float
) -> None:
    correct, n = counts
    z = {0.8: 1.2815515655446004, 0.95: 1.959963984540054, 0.99: 2.5758293035489004}[level]
    low, high = wilson(correct, n, level)
    share = correct / n
    for end in (low, high):
        assert (share - end) ** 2 == pytest.approx(z * z * end * (1 - end) / n, abs=1e-9)
    assert 0 <= low <= share + 1e-12 <= high + 2e-12 <= 1 + 2e-12


def test_the_bootstrap_is_the_percentile_one_over_questions() -> None:
    generator = random.Random(0)
    scores = [generator.choice([3, 5.5, 7, 8, 9, 10]) for _ in range(80)]
    low, high = bootstrap(scores, resamples=10_000, seed=3)
    means = sorted(math.fsum(generator.choices(scores, k=80)) / 80 for _ in range(10_000))
    assert low == pytest.approx(means[250], abs=0.03)
    assert high == pytest.approx(means[9750], abs=0.03)
    # what a normal approximation gives, and the order of the paper's 0.30 to 0.50
    deviation = math.sqrt(math.fsum((score - math.fsum(scores) / 80) ** 2 for score in scores) / 80)
    assert (high - low) / 2 == pytest.approx(1.96 * deviation / math.sqrt(80), rel=0.03)


def test_the_bootstrap_repeats_with_its_seed_only_and_no_questions_have_no_interval() -> None:
    one, again, other = (bootstrap([1.0, 5.0, 9.0], seed=k, resamples=200) for k in (1, 1, 2))
    assert one == again != other
    with rejects("no-rows", "scores"):
        bootstrap([])
