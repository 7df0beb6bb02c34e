"""LESS: every number of its scores by a second way, projections within their error, the store,
and resuming.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from scipy.stats import spearmanr
from support.helpers import F64, assert_same, counted, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    language_sources,
    network_sources,
    through,
    token_losses,
)
from torch import Tensor

from hgms_core import ConfigError, Key, NumericalError, Problem, Tree
from hgms_mix.lm import adamw, adamw_part, adamw_start
from hgms_mix.methods.less import Less
from hgms_mix.methods.less.features import Preconditioner
from hgms_mix.methods.less.projection import Projector

PROBLEM = network_sources()
WIDE = network_sources(hidden=300)  # 2100 lower variables, projected to 1024


def less(**options: Any) -> Less:
    settings = {
        "warmup_share": 0.5,
        "epochs": 3,
        "batch_size": 8,
        "lr": 0.02,
        "chunk": 7,
        "projection": None,
        "keep": 0.2,
    }
    return Less(**(settings | options))


def ranked(method: Less, problem: Problem) -> Tensor:
    *_, (state, _) = through(method, problem)
    return method.ranking(problem, state)


def row_gradient(problem: Problem, x: Tree, data: Any, row: int) -> Tensor:
    """∇ of one row's loss as one vector: an ordinary backward pass."""
    assert problem.sources is not None
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    index = torch.tensor([row])
    tokens = "mask" in data.rows(index)
    loss = (
        token_losses(problem, leaves, data, index)
        if tokens
        else problem.sources.examples(leaves, data.rows(index))
    ).sum()
    return torch.cat(
        [grad.reshape(-1) for grad in torch.autograd.grad(loss, list(leaves.values()))]
    )


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.values()])


def checkpoints(method: Less, problem: Problem) -> list[Tree]:
    """The states of Adam after each epoch of the warm-up."""
    results = [
        state["train"]
        for state, row in through(method, problem)
        if row["phase"] == "warmup" and state["at"] == 0
    ]
    assert len(results) == method.epochs
    return results


def scores_by_hand(method: Less, problem: Problem) -> Tensor:
    """The definition, with loops: one backward pass a row, no projection."""
    rates = [row["lr"] for _, row in through(method, problem) if row["phase"] == "warmup"]
    weights = np.array(rates).reshape(method.epochs, -1).mean(1)
    weights /= weights.sum()
    validation = problem.upper_data["differentiate"]
    pool = problem.lower_data
    total = torch.zeros(pool.size, validation.size, dtype=F64)
    for weight, trained in zip(weights, checkpoints(method, problem), strict=True):
        x = adamw_part(trained, "x")
        m = flat(adamw_part(trained, "m"))
        v = flat(adamw_part(trained, "v"))
        others = [row_gradient(problem, x, validation, j) for j in range(validation.size)]
        for i in range(pool.size):
            g = row_gradient(problem, x, pool, i)
            first = method.betas[0] * m + (1 - method.betas[0]) * g
            second = method.betas[1] * v + (1 - method.betas[1]) * g**2
            inside = method.eps_placement == "inside"
            step = (
                first / torch.sqrt(second + method.eps)
                if inside
                else first / (torch.sqrt(second) + method.eps)
            )
            for j, other in enumerate(others):
                total[i, j] += weight * (step @ other) / (step.norm() * other.norm())
    part = validation.batch(None)["source"]
    return torch.stack([total[:, part == p].mean(1) for p in part.unique()]).amax(0)


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_scores_are_those_of_a_loop_over_rows(placement: str) -> None:
    # A large ε, so that its place matters.
    method = less(eps_placement=placement, eps=1e-2)
    torch.testing.assert_close(
        ranked(method, PROBLEM), scores_by_hand(method, PROBLEM), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("sets", [1, 2])  # fewer validation sets than sources, and as many
def test_rows_count_by_their_tokens_where_means_are_over_tokens(sets: int) -> None:
    problem = language_sources(sets)
    method = less(warmup_share=0.3, epochs=1, batch_size=4, lr=0.01, eps=1e-2)
    (trained,) = checkpoints(method, problem)
    warm = method.init(problem, 3)["warmup"]
    seen: list[Tensor] = []
    spied = evolve(
        problem.lower_data,
        rows=lambda index: (seen.append(index), problem.lower_data.rows(index))[1],
    )
    checkpoints(method, evolve(problem, lower_data=spied))
    updates = [index for index in seen if index.dim() == 1]
    assert sorted(torch.cat(updates).tolist()) == sorted(warm.tolist())
    x = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    optimizer = torch.optim.AdamW(list(x.values()), eps=1e-2, weight_decay=0.0)
    rates = [row["lr"] for _, row in through(method, problem) if row["phase"] == "warmup"]
    for index, rate in zip(updates, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        token_losses(problem, x, problem.lower_data, index).mean().backward()
        optimizer.step()
    assert_same(
        adamw_part(trained, "x"),
        {name: leaf.detach() for name, leaf in x.items()},
        rtol=1e-8,
        atol=1e-10,
    )
    torch.testing.assert_close(
        ranked(method, problem), scores_by_hand(method, problem), rtol=1e-6, atol=1e-9
    )


def test_a_warm_up_of_few_updates_says_so(caplog: pytest.LogCaptureFixture) -> None:
    less(warmup_share=0.5, epochs=5, batch_size=1).init(PROBLEM, 3)  # 5 · 20 updates
    assert caplog.messages == []
    less(warmup_share=0.1, epochs=4, batch_size=1).init(PROBLEM, 3)
    less(warmup_share=0.1, epochs=4, batch_size=32).init(PROBLEM, 3)
    few, too_few = caplog.messages
    assert "takes 16 updates on 4 of the pool's 40 rows" in few
    assert "for 100 updates set warmup_share = 0.63" in few  # 25 rows an epoch
    assert "takes 4 updates" in too_few
    assert "lower batch_size (32)" in too_few


def test_the_place_of_epsilon_is_seen() -> None:
    inside, outside = (
        ranked(less(eps_placement=place, eps=1e-2), PROBLEM) for place in ("inside", "outside")
    )
    assert (inside - outside).abs().max() > 1e-3


def test_adam_step_of_a_row_by_hand() -> None:
    # m' = 0.9·1 + 0.1·2 = 1.1;  v' = 0.99·4 + 0.01·4 = 4;  ε = 5 inside: 1.1/3;  outside: 1.1/7
    item = torch.ones(1, dtype=F64)
    placements: list[tuple[Any, float]] = [("inside", 1.1 / 3), ("outside", 1.1 / 7)]
    for placement, expected in placements:
        step = Preconditioner(betas=(0.9, 0.99), eps=5.0, eps_placement=placement)
        (results,) = step([2 * item[None]], [item], [4 * item])
        assert float(results) == pytest.approx(expected, abs=1e-15)


def test_warm_up_is_adamw_with_a_linear_schedule() -> None:
    method = less(weight_decay=0.1, rising=0.2)
    *_, final = checkpoints(method, PROBLEM)
    states = [method.init(PROBLEM, 3), *(state for state, row in through(method, PROBLEM))]
    rows = [row for _, row in through(method, PROBLEM)]
    assert len(states[0]["warmup"]) == 20
    assert len(set(states[0]["warmup"].tolist())) == 20
    # The rows of each update, seen through a spy, drive torch's own optimiser.
    seen: list[Tensor] = []

    def spy(index: Tensor) -> Tree:
        seen.append(index)
        return PROBLEM.lower_data.rows(index)

    checkpoints(method, evolve(PROBLEM, lower_data=evolve(PROBLEM.lower_data, rows=spy)))
    updates = [index for index in seen if index.dim() == 1]
    assert [len(index) for index in updates] == [8, 8, 4] * 3
    for epoch in range(3):
        assert sorted(torch.cat(updates[3 * epoch : 3 * epoch + 3]).tolist()) == sorted(
            states[0]["warmup"].tolist()
        )
    x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
    optimizer = torch.optim.AdamW(list(x.values()), lr=method.lr, weight_decay=0.1)
    shape = [0.5, 1.0, *((9 - i) / 7 for i in range(2, 9))]  # 2 of 9 updates rise
    assert [row["lr"] for row in rows if row["phase"] == "warmup"] == pytest.approx(
        [method.lr * entry for entry in shape]
    )
    for index, factor in zip(updates, shape, strict=True):
        optimizer.param_groups[0]["lr"] = method.lr * factor
        optimizer.zero_grad()
        PROBLEM.f({}, x, PROBLEM.lower_data.rows(index)).backward()
        optimizer.step()
    assert_same(
        adamw_part(final, "x"),
        {name: leaf.detach() for name, leaf in x.items()},
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sparse"])
def test_projected_scores_are_within_the_projections_error(kind: str) -> None:
    exact = ranked(less(epochs=2), WIDE)
    error = ranked(less(epochs=2, projection=1024, projector=kind), WIDE) - exact
    # A product of unit vectors errs by at most √(2/D) = 0.044 in root mean square; the scores are
    # averages of such.
    assert 1e-4 < float(error.square().mean().sqrt()) < (2 / 1024) ** 0.5
    assert float(error.abs().max()) < 4 * (2 / 1024) ** 0.5


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sparse"])
def test_ranking_is_stable_under_projector_seeds(kind: str) -> None:
    results = [
        ranked(less(epochs=2, projection=1024, projector=kind, projection_seed=seed), WIDE)
        for seed in range(3)
    ]
    for i in range(3):
        assert spearmanr(results[i], results[i - 1]).statistic > 0.95
        assert not torch.equal(results[i], results[i - 1])


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sparse"])
def test_projection_is_one_linear_map_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    projector = Projector(key=Key(5), dims=16, kind=kind)  # type: ignore[arg-type]
    # ten coordinates a block
    monkeypatch.setattr("hgms_mix.methods.less.projection.BLOCK", 16 * 10)
    leaves = [torch.eye(37, dtype=F64)[:, :25].reshape(37, 5, 5), torch.eye(37, dtype=F64)[:, 25:]]
    matrix = projector.apply(leaves)  # the images of all unit vectors: the matrix itself
    assert matrix.shape == (37, 16)
    size = matrix.abs()
    if kind == "rademacher":
        assert_same(size, torch.full_like(size, 0.25), rtol=1e-12)
    if kind == "sparse":  # ±1/2 at four places, which may coincide
        assert bool(((size * 2).round() - size * 2).abs().max() < 1e-12)
        assert bool((size.sum(1) <= 2 + 1e-12).all())
    assert torch.unique(matrix, dim=0).shape[0] > 30
    vectors = torch.randn(4, 37, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert_same(
        projector.apply([vectors[:, :25].reshape(4, 5, 5), vectors[:, 25:]]),
        vectors @ matrix,
        atol=1e-12,
    )
    assert_same(projector.apply(leaves), matrix)
    assert not torch.equal(evolve(projector, key=Key(6)).apply(leaves), matrix)


def test_no_projection_to_more_dimensions() -> None:
    vectors = torch.randn(2, 10, dtype=F64)
    assert_same(Projector(key=Key(0), dims=10, kind="rademacher").apply([vectors]), vectors)
    assert_same(ranked(less(projection=8192), PROBLEM), ranked(less(), PROBLEM))


def test_chunks_do_not_matter() -> None:
    assert_same(
        ranked(less(chunk=1), PROBLEM), ranked(less(chunk=100), PROBLEM), rtol=1e-9, atol=1e-12
    )


def test_the_highest_rows_are_kept_and_make_the_mixture() -> None:
    for options, number in (({"keep": 0.2}, 8), ({"size": 11}, 11), ({"keep": 0.001}, 1)):
        method = less(**options)
        *_, (state, _) = through(method, PROBLEM)
        kept = state["kept"]
        ranking = method.ranking(PROBLEM, state)
        assert len(kept) == number
        rest = [row for row in range(40) if row not in set(kept.tolist())]
        assert ranking[kept].min() >= ranking[rest].max()
        assert PROBLEM.sources is not None
        counts = torch.bincount(PROBLEM.lower_data.whole["source"][kept], minlength=3)
        assert_same(
            PROBLEM.sources.weights(method.result(state)[0]), counts.to(F64) / number, atol=1e-9
        )


def test_rows_that_help_come_first() -> None:
    # β1 = 0: with Adam's momentum nine tenths of every row's step are those of all rows, and scores
    # differ little.
    ranking = ranked(less(betas=(0.0, 0.999)), PROBLEM)
    near, turned, noise = ranking.split([20, 12, 8])
    assert near.mean() > max(turned.mean(), noise.mean()) + 0.05


def test_before_and_between_epochs() -> None:
    method = less()
    state = method.init(PROBLEM, 3)
    assert PROBLEM.sources is not None
    assert_same(
        PROBLEM.sources.weights(method.result(state)[0]),
        torch.full((3,), 1 / 3, dtype=F64),
        rtol=1e-12,
    )
    assert bool(method.ranking(PROBLEM, state).isnan().all())
    whole = [
        method.ranking(PROBLEM, state)
        for state, row in through(method, PROBLEM)
        if row["epoch"] == 2
    ]
    assert bool(torch.isfinite(whole[0]).all())  # the first epoch's, while the second is scored
    assert_same(whole[0], whole[-2])
    assert not torch.equal(whole[-2], whole[-1])


def test_a_validation_set_without_rows_is_left_out() -> None:
    validation = PROBLEM.upper_data["differentiate"]
    first = torch.nonzero(validation.whole["source"] == 0).flatten()
    rows = {name: leaf[first] for name, leaf in validation.whole.items() if name != "index"}
    data = type(validation).of(rows)
    problem = evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "differentiate": data})
    torch.testing.assert_close(
        ranked(less(epochs=1), problem),
        scores_by_hand(less(epochs=1), problem),
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.parametrize("options", [{}, {"projection": 16}, {"train_steps": 4}])
def test_a_state_read_back_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    method = less(epochs=2, **options)
    state = assert_goes_on(method, PROBLEM)
    assert method.finished(state)
    assert_same(method.step(PROBLEM, state)[0]["theta"], state["theta"])  # nothing is left to do


def test_training_on_the_kept_rows() -> None:
    method = less(train_steps=5)
    ends = [(state, row) for state, row in through(method, PROBLEM) if row["phase"] == "train"]
    assert len(ends) == 5
    state = adamw_start(PROBLEM.x0)
    kept = ends[0][0]["kept"]
    assert len(kept) == 8  # one batch
    for count in range(1, 6):
        rows = PROBLEM.lower_data.rows(kept)
        state, _ = adamw(PROBLEM.f, {}, rows, state, Less(), lr=0.02, count=count, step=1)
    assert_same(method.result(ends[-1][0])[1], adamw_part(state, "x"), rtol=1e-9, atol=1e-12)
    open_end = less(epochs=1, train_steps=None)
    state = open_end.init(PROBLEM, 3)
    for _ in range(30):
        state, row = open_end.step(PROBLEM, state)
    assert row["phase"] == "train"
    assert not open_end.finished(state)


def test_costs_are_what_was_called() -> None:
    problem, calls = counted(PROBLEM)
    *_, (_, row) = through(less(), problem)
    # Three epochs of three updates; each then scores 40 rows of the pool and 9 of validation.
    assert row["cost_lower_gradients"] == 9 + 3 * 40
    assert row["cost_upper_gradients"] == 3 * 9
    assert row["oracle_calls"] == 9 + 3 * 49
    assert row["cost_rows"] == 3 * 20 + 3 * 49
    assert calls["pooled"] == 9 + 3 * 6  # passes: updates, six chunks of the pool
    assert calls["f"] == 3 * 2  # two chunks of the validation rows


class TestStore:
    """Features on disk: the same scores again without a gradient, and never those of something
    else.
    """

    def method(self, folder: Path, **options: Any) -> Less:
        return less(epochs=2, store=str(folder / "store"), projection=16, **options)

    def test_scores_come_from_the_stored_features(self, tmp_path: Path) -> None:
        plain = ranked(less(epochs=2, projection=16), PROBLEM)
        problem, calls = counted(PROBLEM)
        first = ranked(self.method(tmp_path), problem)
        spent = calls["pooled"]
        assert_same(first, plain, atol=1e-3)  # half precision
        rows = list(through(self.method(tmp_path), problem))
        assert_same(self.method(tmp_path).ranking(problem, rows[-1][0]), first)
        assert calls["pooled"] - spent == spent - 2 * 6  # no pass over the pool
        features = np.load(tmp_path / "store" / "features-2.npy", mmap_mode="r")
        assert features.shape == (40, 16)
        assert features.dtype == np.float16
        np.testing.assert_allclose(np.linalg.norm(features.astype(float), axis=1), 1, atol=1e-2)

    def test_an_interrupted_store_is_completed(self, tmp_path: Path) -> None:
        expected = ranked(self.method(tmp_path / "whole"), PROBLEM)
        method = self.method(tmp_path / "part")
        problem, calls = counted(PROBLEM)
        for state, row in through(method, problem):
            if row["phase"] == "pool" and state["at"] == 14:
                break
        calls.clear()
        again = [row for _, row in through(method, problem)]
        assert [row["lower_loss"] is None for row in again if row["phase"] == "pool"] == [
            True
        ] * 2 + [False] * 10
        assert_same(ranked(method, PROBLEM), expected)

    @pytest.mark.parametrize(
        "change", [{"lr": 0.03}, {"eps": 1e-3}, {"projection_seed": 1}, {"projector": "gaussian"}]
    )
    def test_another_runs_store_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        ranked(self.method(tmp_path), PROBLEM)
        with rejects("other-settings", str(tmp_path / "store" / "store-1.json"), of=ConfigError):
            ranked(self.method(tmp_path, **change), PROBLEM)

    def test_other_rows_are_refused(self, tmp_path: Path) -> None:
        ranked(self.method(tmp_path), PROBLEM)
        method = self.method(tmp_path)
        # A row that the warm-up does not see: only the rows themselves tell.
        warm = set(method.init(PROBLEM, 3)["warmup"].tolist())
        other = next(row for row in range(40) if row not in warm)
        y = PROBLEM.lower_data.whole["y"].clone()
        y[other] += 1
        rows = lambda index: {**PROBLEM.lower_data.rows(index), "y": y[index]}  # noqa: E731
        with rejects("other-settings", str(tmp_path / "store" / "store-1.json"), of=ConfigError):
            ranked(method, evolve(PROBLEM, lower_data=evolve(PROBLEM.lower_data, rows=rows)))

    def test_a_damaged_store_is_named(self, tmp_path: Path) -> None:
        ranked(self.method(tmp_path), PROBLEM)
        (tmp_path / "store" / "features-1.npy").write_bytes(b"")
        with rejects("damaged-file", str(tmp_path / "store"), of=ConfigError):
            ranked(self.method(tmp_path), PROBLEM)


def broken(problem: Problem, where: Callable[[Tree], Tensor]) -> Problem:
    """The same problem, whose losses are NaN for some rows."""

    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return problem.f(theta, x, batch) + torch.where(where(batch), torch.nan, 0.0).sum()

    assert problem.sources is not None
    return evolve(problem, f=f, sources=evolve(problem.sources, pooled=f))


def test_losses_that_are_not_finite_stop_the_run() -> None:
    warm = less().init(PROBLEM, 3)["warmup"].tolist()
    other = next(row for row in range(40) if row not in warm)
    with rejects("not-finite", of=NumericalError) as caught:
        list(through(less(), broken(PROBLEM, lambda batch: batch["index"] >= 0)))
    assert "step 1" in caught.value.message
    # Three updates, two passes over validation rows, then the chunk of the broken row.
    step = 3 + 2 + other // 7 + 1
    value = PROBLEM.lower_data.whole["y"][other]
    with rejects("not-finite", "method", "lr", of=NumericalError) as caught:
        list(through(less(), broken(PROBLEM, lambda batch: batch["y"] == value)))
    assert f"step {step}: " in caught.value.message
    assert "pool row" in caught.value.message
    assert "1 epochs" in caught.value.message
    value = PROBLEM.upper_data["differentiate"].whole["y"][8]
    with rejects("not-finite", "method", "lr", of=NumericalError) as caught:
        list(through(less(), broken(PROBLEM, lambda batch: batch["y"] == value)))
    assert "step 5: " in caught.value.message
    assert "validation row" in caught.value.message


def test_bad_settings() -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        less().init(network_problem(), 0)
    with rejects("out-of-range", "method", "size", of=ConfigError):
        less(size=41).init(PROBLEM, 0)
    for code, options in (
        ("out-of-range", {"keep": 0.0}),
        ("out-of-range", {"keep": 1.5}),
        ("out-of-range", {"betas": (0.9, 1.0)}),
        ("unknown-choice", {"projector": "hadamard"}),
        ("out-of-range", {"train_steps": -1}),
    ):
        with rejects(code, *options, of=ConfigError):
            Less(**options)
