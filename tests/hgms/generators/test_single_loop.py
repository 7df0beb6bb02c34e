"""SOBA: the three directions from dense derivatives, one step by hand, and where the loop ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.field_problems import pipeline, run, tuned_penalty
from support.helpers import F64, KEY, assert_same, network_problem, normal
from torch import Tensor

from hgms.adapters import from_losses
from hgms.generators.penalty import DynamicBarrier
from hgms.generators.single_loop import Soba
from hgms.hypergradients import Carried
from hgms.outer import Schedule, Sgd
from hgms.selectors import First
from hgms_core import Pipeline, Problem
from hgms_core.trees import Ravel

PROBLEM = network_problem()
ONE = torch.ones(1, dtype=F64)


def soba(generator: Any, lr: float = 0.1, schedule: Schedule | None = None) -> Pipeline:
    return pipeline(generator, First(), Carried(), Sgd(lr=lr, schedule=schedule or Schedule()))


def test_two_steps_by_hand() -> None:
    # g = ½θx², f = ½(x − 1)² + θ²: D_x = θx, D_v = θv + x − 1, D_θ = xv + 2θ at θ = 2, x = 3, v =
    # −1.
    problem = Problem(
        theta0={"t": 2 * ONE},
        x0={"x": 3 * ONE},
        g=lambda t, x, _: 0.5 * (t["t"] * x["x"].square()).sum(),
        f=lambda t, x, _: 0.5 * (x["x"] - 1).square().sum() + t["t"].square().sum(),
    )
    schedule = Schedule(kind="inverse", decay_steps=1, power=0.5)
    method = soba(Soba(lr=0.1, v_lr=0.5, decay=0.5), lr=0.2, schedule=schedule)
    state = method.init(problem, 0)
    state["start"]["v"]["x"] = -ONE
    state, record = method.step(problem, state)
    found = (state["x"]["x"], state["start"]["v"]["x"], state["theta"]["t"])
    assert tuple(map(float, found)) == pytest.approx((3 - 0.1 * 6, -1, 2 - 0.2))
    shown = [float(record[name]) for name in ("upper_loss", "lower_gradient_norm")]
    assert [*shown, float(record["lower_loss"])] == [6.0, 6.0, 9.0]
    # The second step: all rates are 1/√2 of the first, at θ = 1.8, x = 2.4, v = −1.
    state, _ = method.step(problem, state)
    root = 0.5**0.5
    found = (state["x"]["x"], state["start"]["v"]["x"], state["theta"]["t"])
    expected = (2.4 - 0.432 * root, -1 - 0.5 * root * (-1.8 + 1.4), 1.8 - 0.2 * root * 1.2)
    assert tuple(map(float, found)) == pytest.approx(expected)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_directions_are_those_of_the_dense_derivatives(batch_size: int | None) -> None:
    generator = Soba(lr=0.3, v_lr=0.2, batch_size=batch_size, upper_batch_size=batch_size)
    start = generator.init(PROBLEM, KEY)
    start["v"] = {
        name: normal(*leaf.shape, seed=70 + i) for i, (name, leaf) in enumerate(PROBLEM.x0.items())
    }
    found = generator.propose(PROBLEM, PROBLEM.theta0, start, KEY)
    batch, rows = (
        data.batch(None if index is None else index[0])
        for data, index in (
            (data, data.draw(KEY.fold(name), batch_size, 1))
            for data, name in (
                (PROBLEM.lower_data, "lower"),
                (PROBLEM.upper_data["differentiate"], "upper"),
            )
        )
    )
    xs, ts = Ravel.of(PROBLEM.x0), Ravel.of(PROBLEM.theta0)
    x, t, v = xs.ravel(PROBLEM.x0), ts.ravel(PROBLEM.theta0), xs.ravel(start["v"])

    def g(t: Tensor, x: Tensor) -> Tensor:
        return PROBLEM.g(ts.unravel(t), xs.unravel(x), batch)

    def f(t: Tensor, x: Tensor) -> Tensor:
        return PROBLEM.f(ts.unravel(t), xs.unravel(x), rows)

    slope = torch.func.grad(g, 1)
    hessian, mixed = (torch.func.jacrev(slope, argument)(t, x) for argument in (1, 0))
    f_t, f_x = torch.func.grad(f, (0, 1))(t, x)
    moved = {
        **{f"v.{k}": leaf for k, leaf in xs.unravel(v - 0.2 * (hessian @ v + f_x)).items()},
        **{f"theta.{k}": leaf for k, leaf in ts.unravel(mixed.T @ v + f_t).items()},
    }
    close = {"rtol": 1e-12, "atol": 1e-14}
    assert_same(found.at(0), xs.unravel(x - 0.3 * slope(t, x)), **close)
    assert_same({name: found.aux[name][0] for name in moved}, moved, **close)
    assert_same(found.losses, g(t, x)[None], rtol=1e-12)


def test_without_upper_variables_the_lower_level_goes_on() -> None:
    x0 = {"x": torch.ones(2, dtype=F64)}
    problem = from_losses(
        theta0={},
        x0=x0,
        g=lambda t, x, _: x["x"].square().sum() / 2,
        f=lambda t, x, _: (x["x"] - 3).square().sum() / 2,
    )
    for generator in (DynamicBarrier(lr=0.25, inner_lr=0.5, steps=2), Soba(lr=0.25, v_lr=0.5)):
        moved: Any = generator.propose(problem, {}, generator.init(problem, KEY), KEY)
        assert float(moved.losses[0]) == 1.0
        assert not any(name.startswith("theta.") for name in moved.aux)
    assert_same((moved.at(0)["x"], moved.aux["v.x"][0]), (0.75 * x0["x"], x0["x"]))  # v: −½∇f


@pytest.mark.extended
def test_it_reaches_the_closed_form_optimum() -> None:
    problem, exact, best = tuned_penalty()
    theta, x, record = run(soba(Soba(lr=0.5, v_lr=0.5), lr=0.2), problem, 400)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=1e-6)
    assert_same(x, exact.solution(theta), rtol=1e-6, atol=1e-6)
    assert float(record["hypergradient_norm"]) < 1e-6
