"""LESS: every number of its scores by a second way, and projections within their error."""

from __future__ import annotations

import pytest
import torch
from support.helpers import F64, assert_same
from support.less_runs import PROBLEM, checkpoints, less, ranked, scores_by_hand
from support.source_problems import (
    by_torch,
    language_sources,
    network_sources,
    on_rows,
    through,
    token_losses,
    watched,
)
from torch import Tensor

from hgms_core import Key, Problem
from hgms_mix.lm import adamw_part
from hgms_mix.methods.less import GradientProjection, Less

CLOSE = {"rtol": 1e-6, "atol": 1e-9}


def rates(method: Less, problem: Problem) -> list[float]:
    return [row["lr"] for _, row in through(method, problem) if row["phase"] == "warmup"]


def updates(method: Less, problem: Problem) -> list[Tensor]:
    """The rows of each update of the warm-up."""
    spied, seen = watched(problem)
    checkpoints(method, spied)
    return [index for index in seen["pool"] if index.dim() == 1]


def test_scores_are_those_of_a_loop_over_rows() -> None:
    """With a large ε, so that its place matters."""
    ways = [
        less(eps_placement=placement, eps=1e-2, epochs=2) for placement in ("inside", "outside")
    ]
    inside, outside = (ranked(method, PROBLEM) for method in ways)
    expected = [scores_by_hand(method, PROBLEM) for method in ways]
    assert_same([inside, outside], expected, **CLOSE)
    assert (inside - outside).abs().max() > 1e-3


@pytest.mark.parametrize("sets", [1, pytest.param(2, marks=pytest.mark.extended)])
def test_rows_count_by_their_tokens_where_means_are_over_tokens(sets: int) -> None:
    """With fewer validation sets than sources, and as many."""
    problem = language_sources(sets)
    method = less(share=0.3, epochs=1, batch_size=4, lr=0.01, eps=1e-2)
    (trained,) = checkpoints(method, problem)
    batches = updates(method, problem)
    warm = method.init(problem, 3)["warmup"]
    assert sorted(torch.cat(batches).tolist()) == sorted(warm.tolist())
    pool = problem.lower_data
    losses = [lambda x, i=index: token_losses(problem, x, pool, i).mean() for index in batches]
    x = by_torch(problem.x0, losses, rates=rates(method, problem), eps=1e-2)[-1]
    assert_same(adamw_part(trained, "x"), x, rtol=1e-8, atol=1e-10)
    assert_same(ranked(method, problem), scores_by_hand(method, problem), **CLOSE)


def test_warm_up_is_adamw_with_a_linear_schedule() -> None:
    method = less(weight_decay=0.1, rising=0.2)
    *_, final = checkpoints(method, PROBLEM)
    warm = sorted(method.init(PROBLEM, 3)["warmup"].tolist())
    assert len(set(warm)) == 20
    batches = updates(method, PROBLEM)
    assert [len(index) for index in batches] == [8, 8, 4] * 3
    epochs = [sorted(torch.cat(batches[at : at + 3]).tolist()) for at in (0, 3, 6)]
    assert epochs == 3 * [warm]
    # 2 of 9 updates rise
    expected = [method.lr * share for share in (0.5, 1.0, *((9 - i) / 7 for i in range(2, 9)))]
    assert rates(method, PROBLEM) == pytest.approx(expected)
    x = by_torch(PROBLEM.x0, on_rows(PROBLEM, batches), rates=expected, weight_decay=0.1)[-1]
    assert_same(adamw_part(final, "x"), x, rtol=1e-12, atol=1e-14)


def test_projected_scores_are_within_the_projections_error() -> None:
    wide = network_sources(hidden=160)  # 1120 lower variables, projected to 512
    exact = ranked(less(epochs=1), wide)
    first, other = (
        ranked(less(epochs=1, projection=GradientProjection(dims=512, seed=seed)), wide)
        for seed in (0, 1)
    )
    # A product of unit vectors errs by at most √(2/D) in root mean square; the scores are
    # averages of such.
    for error in (first - exact, other - exact):
        assert 1e-4 < float(error.square().mean().sqrt()) < (2 / 512) ** 0.5
        assert float(error.abs().max()) < 4 * (2 / 512) ** 0.5
    assert not torch.equal(first, other)


def test_projection_is_one_linear_map_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    projection = GradientProjection(dims=16)
    # ten coordinates a block
    monkeypatch.setattr("hgms_mix.methods.less.gradients.BLOCK", 16 * 10)
    leaves = [torch.eye(37, dtype=F64)[:, :25].reshape(37, 5, 5), torch.eye(37, dtype=F64)[:, 25:]]
    matrix = projection.apply(leaves, Key(5))  # the images of all unit vectors: the matrix itself
    assert matrix.shape == (37, 16)
    size = matrix.abs()
    # ±1/2 at four places, which may coincide
    assert bool(((size * 2).round() - size * 2).abs().max() < 1e-12)
    assert bool((size.sum(1) <= 2 + 1e-12).all())
    vectors = torch.randn(4, 37, generator=torch.Generator().manual_seed(0), dtype=F64)
    parts = [vectors[:, :25].reshape(4, 5, 5), vectors[:, 25:]]
    assert_same(projection.apply(parts, Key(5)), vectors @ matrix, atol=1e-12)
    assert not torch.equal(projection.apply(leaves, Key(6)), matrix)
    assert_same(
        GradientProjection(dims=37).apply([vectors], Key(5)), vectors
    )  # none to more dimensions


def test_neither_chunks_nor_a_projection_to_more_dimensions_matter() -> None:
    expected = ranked(less(epochs=1, chunk=100), PROBLEM)
    assert_same(ranked(less(epochs=1, chunk=1), PROBLEM), expected, rtol=1e-9, atol=1e-12)
    assert_same(
        ranked(less(epochs=1, chunk=100, projection=GradientProjection()), PROBLEM),
        expected,
        rtol=1e-12,
    )


def test_a_ranking_is_that_of_the_last_whole_epoch() -> None:
    method = less(epochs=2)
    assert bool(method.ranking(PROBLEM, method.init(PROBLEM, 3)).isnan().all())
    first, *_, same, last = (
        method.ranking(PROBLEM, state)
        for state, row in through(method, PROBLEM)
        if row["epoch"] == 2
    )
    assert bool(torch.isfinite(first).all())  # the first epoch's, while the second is scored
    assert_same(first, same)
    assert not torch.equal(same, last)
