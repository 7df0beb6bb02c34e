"""RHO-LOSS by hand on four rows, against its definition on a network, and that the reference
sees no row it should not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted, network_problem, rejects
from support.source_problems import (
    assert_goes_on,
    convex_sources,
    network_sources,
    through,
    watched,
)
from torch import Tensor

from hgms_core import ConfigError, Data, NumericalError, Problem, Tree
from hgms_mix.lm import adamw_part
from hgms_mix.methods.rho_loss import RhoLoss

PROBLEM = network_sources()


def rho(**options: Any) -> RhoLoss:
    settings = {
        "reference_epochs": 3,
        "reference_lr": 0.02,
        "lr": 0.02,
        "batch_size": 4,
        "chunk": 7,
        "keep": 0.2,
    }
    settings |= {"reference": "validation", "target_steps": 0}
    return RhoLoss(**(settings | options))


def column(values: list[float]) -> Tree:
    return {
        "a": torch.tensor(values, dtype=F64)[:, None],
        "source": torch.zeros(len(values), dtype=torch.int64),
    }


def four_rows(stop: float = 1.0) -> Problem:
    """Loss ½(x − a)², x0 = 0. Source near: a = 1, 1; source far: a = −1, 3. Validation rows at
    1, held-out rows at ``stop``.
    """
    problem = convex_sources({"near": 0.5, "far": 0.5}, rows=2)
    pool = {**column([1.0, 1.0, -1.0, 3.0]), "source": torch.tensor([0, 0, 1, 1])}
    upper = {"differentiate": [1.0, 1.0], "select": [torch.nan], "stop": [stop]}
    return evolve(
        problem,
        x0={"x": torch.zeros(1, dtype=F64)},
        lower_data=evolve(Data.of(pool), strata=problem.lower_data.strata),
        upper_data={role: Data.of(column(values)) for role, values in upper.items()},
    )


def by_hand(**options: Any) -> RhoLoss:
    """Adam's first step is as long as its learning rate: the reference goes from 0 to 0.5."""
    settings = {
        "reference_epochs": 1,
        "reference_lr": 0.5,
        "lr": 0.5,
        "batch_size": 2,
        "weight_decay": 0.0,
        "size": 2,
    }
    settings |= {"reference": "validation", "target_steps": 0}
    return RhoLoss(**(settings | options))


def test_static_scores_by_hand() -> None:
    problem = four_rows()
    method = by_hand()
    *_, (state, row) = through(method, problem)
    # At 0: ½, ½, ½, 4½. At ½: ⅛, ⅛, 1⅛, 3⅛.
    assert_same(
        method.ranking(problem, state),
        torch.tensor([0.375, 0.375, -0.625, 1.375], dtype=F64),
        atol=1e-7,
    )
    assert state["kept"].tolist() == [3, 0]
    assert problem.sources is not None
    assert_same(
        problem.sources.weights(method.result(state)[0]),
        torch.tensor([0.5, 0.5], dtype=F64),
        atol=1e-9,
    )
    assert_same(method.result(state)[1], problem.x0)  # the one that was scored
    # 1 update of the reference, 2 looks at the held-out row, and one pass each for both losses.
    assert (row["cost_upper_gradients"], row["cost_upper_values"], row["cost_lower_gradients"]) == (
        1,
        4,
        0,
    )
    assert row["cost_rows"] == 2 + 2 * 1 + 2 * 4


def test_online_by_hand() -> None:
    problem = four_rows()
    method = by_hand(mode="online", big_batch=4, top=0.5, train_steps=2)
    *_, (before, _), (state, first), (_, second) = through(method, problem)
    assert before["phase"] == "online"
    # Rows 3 and one at 1 move x by +½, to the reference: nothing is reducible then.
    assert_same(method.result(state)[1], {"x": torch.tensor([0.5], dtype=F64)}, atol=1e-7)
    assert state["used"].tolist() == [1, 1]
    assert problem.sources is not None
    assert_same(
        problem.sources.weights(method.result(state)[0]),
        torch.tensor([0.5, 0.5], dtype=F64),
        atol=1e-9,
    )
    assert float(first["reducible_loss"]) == pytest.approx(1.5 / 4, abs=1e-7)
    assert float(second["reducible_loss"]) == pytest.approx(0.0, abs=1e-7)
    assert second["cost_rows"] - first["cost_rows"] == 6


@pytest.mark.parametrize(("stop", "expected"), [(-1.0, 0.0), (0.4, 0.5), (2.0, 1.0)])
def test_the_reference_with_the_lowest_held_out_loss_is_kept(stop: float, expected: float) -> None:
    # After 0, 1 and 2 epochs the reference is at 0, 0.5 and a little below 1.
    method = by_hand(reference_epochs=2)
    states = [
        state for state, row in through(method, four_rows(stop)) if row["phase"] == "reference"
    ]
    x = float(adamw_part(states[-1]["train"], "x")["x"])
    assert x == pytest.approx(expected, abs=0.06)
    assert (x == 0.0) == (stop == -1.0)


def losses(x: Tree, data: Data) -> Tensor:
    assert PROBLEM.sources is not None
    return torch.stack(
        [PROBLEM.sources.examples(x, data.rows(torch.tensor([i])))[0] for i in range(data.size)]
    )


def trained(x0: Tree, data: Data, batches: list[Tensor], lr: float) -> Iterator[Tree]:
    """torch's AdamW on the mean loss of batches of rows."""
    x = {name: leaf.clone().requires_grad_() for name, leaf in x0.items()}
    optimizer = torch.optim.AdamW(list(x.values()), lr=lr, weight_decay=0.01)
    for batch in batches:
        optimizer.zero_grad()
        losses_of = PROBLEM.f({}, x, data.rows(batch))
        losses_of.backward()
        optimizer.step()
        yield {name: leaf.detach().clone() for name, leaf in x.items()}


def test_scores_are_the_difference_of_two_models_losses() -> None:
    problem, seen = watched(PROBLEM)
    method = rho(target_steps=6)
    *_, (state, _) = through(method, problem)
    batches = seen["differentiate"]
    assert [len(batch) for batch in batches] == [4, 4, 1] * 3
    states = [
        PROBLEM.x0,
        *list(trained(PROBLEM.x0, PROBLEM.upper_data["differentiate"], batches, 0.02))[2::3],
    ]
    best = min(states, key=lambda x: float(losses(x, PROBLEM.upper_data["stop"]).mean()))
    target = list(
        trained(
            PROBLEM.x0,
            PROBLEM.lower_data,
            [batch for batch in seen["pool"] if len(batch) == 4],
            0.02,
        )
    )
    assert len(target) == 6
    expected = losses(target[-1], PROBLEM.lower_data) - losses(best, PROBLEM.lower_data)
    assert_same(method.ranking(PROBLEM, state), expected, rtol=1e-9, atol=1e-11)
    assert_same(method.result(state)[1], target[-1], rtol=1e-9, atol=1e-11)
    assert sorted(expected[state["kept"]].tolist()) == sorted(expected.tolist())[-8:]
    assert seen["select"] == []


def test_by_default_a_reference_of_one_half_scores_the_other_at_a_trained_x() -> None:
    problem, seen = watched(PROBLEM)
    method = RhoLoss(
        reference_epochs=2, reference_lr=0.02, lr=0.02, batch_size=4, chunk=7, keep=0.2
    )
    *_, (state, row) = through(method, problem)
    first, second = torch.tensor_split(state["order"], 2)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(40))
    # Two halves of 20 rows, two epochs of five updates each; then ten updates of x: a pass over the
    # pool.
    updates = [batch for batch in seen["pool"] if len(batch) == 4]
    assert len(updates) == 2 * 10 + 10
    expected = torch.full((40,), torch.nan, dtype=F64)
    for number, (own, other) in enumerate(((first, second), (second, first))):
        batches = updates[10 * number : 10 * number + 10]
        for epoch in range(2):
            assert sorted(torch.cat(batches[5 * epoch : 5 * epoch + 5]).tolist()) == sorted(
                own.tolist()
            )
        states = [PROBLEM.x0, *list(trained(PROBLEM.x0, PROBLEM.lower_data, batches, 0.02))[4::5]]
        best = min(states, key=lambda x: float(losses(x, PROBLEM.upper_data["stop"]).mean()))
        expected[other] = losses(best, PROBLEM.lower_data)[other]
    assert sorted(torch.cat(updates[20:]).tolist()) == list(range(40))
    target = list(trained(PROBLEM.x0, PROBLEM.lower_data, updates[20:], 0.02))[-1]
    scores = losses(target, PROBLEM.lower_data) - expected
    assert_same(method.ranking(PROBLEM, state), scores, rtol=1e-9, atol=1e-11)
    assert_same(method.result(state)[1], target, rtol=1e-9, atol=1e-11)
    assert (seen["differentiate"], seen["select"]) == ([], [])
    assert (row["cost_lower_gradients"], row["cost_upper_gradients"]) == (30, 0)


def test_online_updates_are_those_of_the_definition() -> None:
    problem, seen = watched(PROBLEM)
    method = rho(mode="online", big_batch=10, top=0.3, train_steps=5)
    steps = [(state, row) for state, row in through(method, problem)]
    irreducible = steps[-1][0]["irreducible"]
    online = [state for state, row in steps if row["phase"] == "online"]
    # chunks of 7 + 3, then the 3 that are used
    chosen = [batch for batch in seen["pool"] if len(batch) == 3][-9:]
    used = []
    drawn = []
    x = PROBLEM.x0
    for i, state in enumerate(online):
        big = torch.cat(seen["pool"][-3 * len(online) + 3 * i :][:2])
        assert len(big) == 10
        scores = losses(x, PROBLEM.lower_data)[big] - irreducible[big]
        picked = seen["pool"][-3 * len(online) + 3 * i + 2]
        assert sorted(picked.tolist()) == sorted(big[scores.argsort(descending=True)[:3]].tolist())
        assert_same(method.ranking(PROBLEM, state)[big], scores, rtol=1e-9, atol=1e-11)
        used.append(picked)
        drawn.append(big)
        x = list(trained(PROBLEM.x0, PROBLEM.lower_data, used, 0.02))[-1]
        assert_same(method.result(state)[1], x, rtol=1e-9, atol=1e-11)
    assert len(chosen) == 9
    assert sorted(torch.cat(drawn[:4]).tolist()) == list(range(40))  # an epoch of big batches
    assert PROBLEM.sources is not None
    counts = torch.bincount(PROBLEM.lower_data.whole["source"][torch.cat(used)], minlength=3).to(
        F64
    )
    assert_same(PROBLEM.sources.weights(method.result(online[-1])[0]), counts / 15, atol=1e-9)


def test_noisy_rows_are_not_chosen() -> None:
    # Their loss is high at first and stays high for a reference that knows the target.
    method = rho(reference_epochs=60, size=10, target_steps=0)
    *_, (state, _) = through(method, PROBLEM)
    near = method.ranking(PROBLEM, state)[:20].mean()
    turned = method.ranking(PROBLEM, state)[20:32].mean()
    assert near > turned + 0.1
    assert PROBLEM.sources is not None
    assert float(PROBLEM.sources.weights(method.result(state)[0])[0]) > 0.5


@pytest.mark.parametrize(
    "options",
    [{"target_steps": 3, "train_steps": 3}, {"mode": "online", "train_steps": 4, "big_batch": 9}],
)
def test_a_state_read_back_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    method = rho(**options)
    assert method.finished(assert_goes_on(method, PROBLEM))


def test_training_on_the_kept_rows() -> None:
    problem, seen = watched(PROBLEM)
    method = rho(train_steps=5)
    steps = [(state, row) for state, row in through(method, problem)]
    kept = steps[-1][0]["kept"]
    batches = seen["pool"][-5:]
    assert [len(batch) for batch in batches] == [4] * 5
    assert sorted(torch.cat(batches[:2]).tolist()) == sorted(kept.tolist())
    *_, x = trained(PROBLEM.x0, PROBLEM.lower_data, batches, 0.02)
    assert_same(method.result(steps[-1][0])[1], x, rtol=1e-9, atol=1e-11)


def test_before_anything_is_known() -> None:
    method = rho()
    state = method.init(PROBLEM, 3)
    assert PROBLEM.sources is not None
    assert_same(
        PROBLEM.sources.weights(method.result(state)[0]),
        torch.full((3,), 1 / 3, dtype=F64),
        rtol=1e-12,
    )
    assert bool(method.ranking(PROBLEM, state).isnan().all())


def test_static_scores_of_some_rows_are_no_ranking() -> None:
    method = rho(chunk=7)
    known = [
        (int((~state["ranking"].isnan()).sum()), method.ranking(PROBLEM, state))
        for state, _ in through(method, PROBLEM)
    ]
    partly = [ranking for count, ranking in known if 0 < count < PROBLEM.lower_data.size]
    assert partly
    assert all(bool(ranking.isnan().all()) for ranking in partly)
    assert not known[-1][1].isnan().any()


def test_costs_are_what_was_called() -> None:
    problem, calls = counted(PROBLEM)
    *_, (_, row) = through(rho(target_steps=2, train_steps=2), problem)
    assert row["cost_upper_gradients"] == 9
    assert row["cost_lower_gradients"] == 4
    assert (calls["f"], calls["pooled"]) == (9, 4)
    assert row["cost_upper_values"] == 4 + 2 * 6  # held-out looks, and six chunks of the pool twice
    assert row["cost_rows"] == 3 * 9 + 4 * 7 + 2 * 40 + 4 * 4
    assert row["oracle_calls"] == 9 + 4 + 16


def test_losses_that_are_not_finite_stop_the_run() -> None:
    pool = {**PROBLEM.lower_data.whole, "y": PROBLEM.lower_data.whole["y"].clone()}
    pool["y"][15] = torch.nan
    data = evolve(
        Data.of({name: leaf for name, leaf in pool.items() if name != "index"}),
        strata=PROBLEM.lower_data.strata,
    )
    # 9 updates, then the third chunk
    with rejects("not-finite", "method", "lr", of=NumericalError) as caught:
        list(through(rho(), evolve(PROBLEM, lower_data=data)))
    assert "step 12" in caught.value.message
    problem = four_rows()
    upper = {**problem.upper_data, "differentiate": Data.of(column([torch.nan, torch.nan]))}
    with rejects("not-finite", of=NumericalError) as caught:
        list(through(by_hand(), evolve(problem, upper_data=upper)))
    assert "step 1: " in caught.value.message


def test_bad_settings() -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        rho().init(network_problem(), 0)
    with rejects("out-of-range", "method", "size", of=ConfigError):
        rho(size=41).init(PROBLEM, 0)
    with rejects("no-rows-for-role", "problem", "upper_data", "stop", of=ConfigError):
        rho().init(evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "stop": Data.none()}), 0)
    with rejects("conflicting-options", "train_steps", of=ConfigError):
        RhoLoss(mode="online")
    for code, options in (
        ("out-of-range", {"keep": 0.0}),
        ("out-of-range", {"top": 1.5}),
        ("out-of-range", {"betas": (0.9, 1.0)}),
        ("unknown-choice", {"mode": "offline"}),
        ("out-of-range", {"train_steps": -1}),
    ):
        with rejects(code, *options, of=ConfigError):
            RhoLoss(**options)
