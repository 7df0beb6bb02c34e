"""How certain a mixture is: the statistics against closed forms, other packages and simulation,
all in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from support.helpers import F64, normal, rejects
from support.source_problems import convex_sources, network_sources

from hgms.uncertainty import alignments, centre, clr, holm, over_rows, over_seeds, with_pivot
from hgms.uncertainty.alignment import fold
from hgms.uncertainty.seeds import hotelling
from hgms_core import ConfigError, Key, Problem, Sources

EVEN = {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}


def test_centred_log_ratios_and_back() -> None:
    weights = np.random.default_rng(0).dirichlet([2.0] * 5, size=20)
    ratios = clr(weights)
    assert np.allclose(ratios.sum(1), 0)
    assert np.allclose(centre(ratios), weights)
    assert np.allclose(ratios[:, 0] - ratios[:, 1], np.log(weights[:, 0] / weights[:, 1]))


@pytest.mark.parametrize("value", [-2.0, 0.0, 3.0])
def test_a_weight_by_its_log_ratio_keeps_the_proportions_of_the_others(value: float) -> None:
    weight = with_pivot(clr([0.5, 0.3, 0.15, 0.05]), 1, value)
    others = np.array([0.5, 0.15, 0.05]) / 0.7 * (1 - weight)
    assert clr([others[0], weight, *others[1:]])[1] == pytest.approx(value)


@pytest.mark.extended
def test_holm_and_hotelling_are_those_of_statsmodels_in_any_basis() -> None:
    pytest.importorskip("statsmodels", reason="statsmodels is not installed")
    from statsmodels.stats.multitest import multipletests
    from statsmodels.stats.multivariate import test_mvmean as mvmean

    for row in np.random.default_rng(1).uniform(0, 0.1, (20, 6)):
        assert holm(row.tolist()) == pytest.approx(multipletests(row, method="holm")[1].tolist())
    rows = clr(np.random.default_rng(2).dirichlet([2.0, 3.0, 4.0, 5.0], size=12)) - clr([0.25] * 4)
    expected = mvmean(rows[:, :3], np.zeros(3))  # any three of four coordinates
    assert hotelling(rows) == pytest.approx(expected.pvalue, rel=1e-9)


def test_over_seeds_is_a_t_interval_of_the_log_odds_where_there_are_two_sources() -> None:
    weights = np.array([0.6, 0.7, 0.55, 0.8, 0.65])
    learned = [{"a": weight, "b": 1 - weight} for weight in weights.tolist()]
    certain = over_seeds(learned, {"a": 0.5, "b": 0.5})
    odds = np.log(weights / (1 - weights))
    expected = stats.ttest_1samp(odds, 0.0)
    low, high = expected.confidence_interval(0.95)
    first = certain.effects[0]
    logits = [low, odds.mean(), high]
    assert (first.low, first.value, first.high) == pytest.approx(
        tuple(1 / (1 + math.exp(-logit)) for logit in logits)
    )
    # of two sources: one question
    assert (certain.p, first.p) == pytest.approx((expected.pvalue, expected.pvalue))


@pytest.mark.extended
def test_over_seeds_covers_the_true_weights_and_is_wrong_at_its_level() -> None:
    """1,000 experiments of 6 seeds: intervals cover in 95 % of them, and a word too many is said
    in at most 5 %.
    """
    means = np.array([0.8, 0.0, -0.3, -0.5])
    truth = dict(zip("abcd", centre(means).tolist(), strict=True))
    draws = means + 0.7 * np.random.default_rng(0).standard_normal((1000, 6, 4))
    runs = [[dict(zip("abcd", row, strict=True)) for row in centre(it).tolist()] for it in draws]
    covered = [
        effect.low <= weight <= effect.high
        for learned in runs
        for effect, weight in zip(over_seeds(learned, EVEN).effects, truth.values(), strict=True)
    ]
    wrong = [any(it.sign for it in over_seeds(learned, truth).effects) for learned in runs]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)
    assert np.mean(wrong) < 0.065


def test_seeds_without_a_spread_and_no_gains_say_nothing() -> None:
    still = over_seeds([EVEN] * 5, EVEN)
    certain = over_rows(torch.zeros(8, 2, 4), "ab", torch.tensor([0.5, 0.5]), Key(0), resamples=50)
    assert [(it.p, it.evidence) for it in (still, certain)] == [(1.0, False)] * 2
    assert not over_seeds([{"a": 1.0, "b": 0.0}] * 5, {"a": 0.5, "b": 0.5}).evidence  # nor corners


def crossed(
    seed: int, means: list[float], *, validation: int = 16, blocks: int = 8, luck: float = 1.0
) -> torch.Tensor:
    """Gains with the luck of validation blocks (by source), of source blocks, and of both."""
    generator = torch.Generator().manual_seed(seed)
    count = len(means)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=F64, generator=generator)

    of_rows = drawn(validation, count, 1)
    of_blocks = luck * drawn(1, count, blocks)
    return (
        torch.tensor(means, dtype=F64)[:, None]
        + of_rows
        + of_blocks
        + 0.5 * drawn(validation, count, blocks)
    )


@pytest.mark.extended
@pytest.mark.parametrize("prior", [[1 / 3, 1 / 3, 1 / 3], [0.6, 0.3, 0.1]])
def test_over_rows_covers_the_truth_and_is_wrong_at_its_level(prior: list[float]) -> None:
    """300 experiments in which nothing is there; the intervals are never short of 95 % by more
    than chance.
    """
    share = torch.tensor(prior, dtype=F64)
    tests = [
        over_rows(crossed(trial, [0.0] * 3), "abc", share, Key(trial), resamples=300)
        for trial in range(300)
    ]
    assert np.mean([e.low <= 0 <= e.high for test in tests for e in test.effects]) > 0.93
    assert np.mean([test.evidence for test in tests]) < 0.08


def test_over_rows_is_centred_at_the_prior_and_has_the_standard_error_of_two_way_means() -> None:
    gains = crossed(7, [1.0, 0.0, -1.0], validation=40, blocks=12)
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    certain = over_rows(gains, "abc", prior, Key(0), resamples=2000)
    means = gains.mean((0, 2))
    assert [effect.value for effect in certain.effects] == pytest.approx(
        (means - prior @ means).tolist()
    )
    # by a loop of its own: the spread of directions over rows, and of sources over blocks
    for s, effect in enumerate(certain.effects):
        rows = gains.mean(2)[:, s] - gains.mean(2) @ prior
        variance = rows.var() / 40
        for r in range(3):
            variance += (float(s == r) - prior[r]) ** 2 * gains.mean(0)[r].var() / 12
        quantile = (effect.high - effect.value) / float(variance.sqrt())
        assert 1.8 < quantile < 2.6


def gain_by_loop(
    problem: Problem, x: dict[str, torch.Tensor], v: torch.Tensor, rows: torch.Tensor
) -> float:
    """f at the validation block after a tiny step on the source block: a difference, no inner
    product.
    """
    assert problem.find(Sources) is not None
    step = 1e-5
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    loss = problem.find(Sources).pooled(problem.theta0, leaves, problem.lower_data.rows(rows))
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    batch = problem.upper_data["differentiate"].rows(v)
    there, back = (
        problem.f(
            problem.theta0,
            {n: leaf - sign * step * s for (n, leaf), s in zip(x.items(), slopes, strict=True)},
            batch,
        )
        for sign in (1, -1)
    )
    return float(back - there) / (2 * step)


def test_gains_are_what_a_small_step_takes_off_the_validation_loss() -> None:
    problem = network_sources()
    aligned = alignments(
        problem, [problem.x0], Key(3), validation_blocks=4, source_blocks=4, rows=2
    )

    def blocks(rows: int, *of: str) -> torch.Tensor:
        drawn = torch.randperm(rows, generator=Key(3).fold(*of).generator())
        return drawn[:8].reshape(4, 2)

    checked, pool = blocks(9, "validation"), blocks(12, "source", "turned") + 20
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    batch = problem.upper_data["differentiate"].rows(checked.reshape(-1))
    slopes = torch.autograd.grad(problem.f(problem.theta0, leaves, batch), list(leaves.values()))
    squared = float(sum(slope.square().sum() for slope in slopes))
    for v, m in ((0, 0), (2, 3)):
        expected = gain_by_loop(problem, problem.x0, checked[v], pool[m]) / squared
        assert float(aligned.gains[v, 1, m]) == pytest.approx(expected, rel=1e-5)


def test_folded_gradients_have_the_same_products_but_for_a_little() -> None:
    a = normal(200_000, seed=1)
    b = normal(200_000, seed=2) + a
    x, y = (fold([leaf], 20_000, Key(0)) for leaf in (a, b))
    scale = float(a.norm() * b.norm())
    assert len(x) == 20_000
    assert float(x @ y) / scale == pytest.approx(float(a @ b) / scale, abs=4 / math.sqrt(20_000))


def test_a_problem_without_sources_or_rows_is_refused() -> None:
    few = convex_sources({"a": 0.5, "b": 0.5}, rows=3)
    with rejects("not-supported", "problem", of=ConfigError):
        alignments(few.without(Sources), [few.x0], Key(0))
    with rejects("too-few-rows", "sources", "a", of=ConfigError):
        alignments(few, [few.x0], Key(0))
