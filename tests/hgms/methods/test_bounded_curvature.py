"""A bound on the lower curvature: the estimate, what it changes, and methods with fixed rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal

import hgms
from hgms.gauss_newton import Composite
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.methods import BoundedCurvature
from hgms.methods.bounded_curvature import Scaled, largest_curvature, scaled_problem
from hgms.optim import SGD
from hgms.outer import Adam, Sgd
from hgms.runs import RunConfig, pack, unpack
from hgms.selectors import First
from hgms.solvers import CG
from hgms_core import Data, Key, Pipeline, Problem, Rows, Tree
from hgms_core.capabilities import HasOutputs, StacksCandidates, find

FIXED_RATES = (
    "soba",
    "amigo",
    "stocbio",
    "fixed-point",
    "lancbio",
    "darts",
    "iaptt-gm",
    "hg-ms-ula",
)


def steep(largest: float) -> Problem:
    """x* = θ with eigenvalues of the lower Hessian from largest/10 to ``largest``; F = (θ − 1)²."""
    basis, _ = torch.linalg.qr(normal(4, 4, seed=3))
    hessian = basis @ torch.diag(torch.linspace(largest / 10, largest, 4, dtype=F64)) @ basis.T

    def g(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        error = x["x"] - theta["t"]
        return 0.5 * error @ hessian @ error

    return Problem(
        theta0={"t": torch.zeros(4, dtype=F64)},
        x0={"x": torch.full((4,), 0.1, dtype=F64)},
        g=g,
        f=lambda theta, x, batch: (x["x"] - 1).square().sum(),
    )


def pipeline(lr: float = 0.1) -> Pipeline:
    return Pipeline(
        generator=Branches(count=1, steps=20, optimizer=SGD(lr=lr)),
        selector=First(),
        hypergradient=Implicit(solver=CG(ridge=0.0, rtol=1e-12, max_steps=8)),
        outer=Sgd(lr=0.1),
    )


def steps(method: Any, problem: Problem, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    state = method.init(problem, seed=0)
    record: dict[str, Any] = {}
    for _ in range(count):
        state, record = method.step(problem, state)
    return state, record


@pytest.mark.parametrize("largest", [3.0, 4000.0])
def test_the_estimate_is_the_largest_eigenvalue(largest: float) -> None:
    problem = steep(largest)
    found, cost = largest_curvature(problem, problem.theta0, problem.x0, Key(0))
    assert 0.95 * largest < found <= largest * (1 + 1e-6)
    assert cost.lower_gradients == 40


def test_a_batch_has_at_most_the_rows_of_a_batch_of_the_generator() -> None:
    data = Data.of({"a": torch.zeros(90)})
    problem = evolve(steep(1.0), lower_data=data)
    for rows, used in ((None, 90), (8, 8)):
        inner = evolve(pipeline(), generator=Branches(count=1, steps=1, batch_size=rows))
        state = BoundedCurvature(method=inner, max_curvature=1.0).init(problem, seed=0)
        assert state["cost"]["rows"] == 40 * used


def test_a_flat_lower_level_is_not_changed() -> None:
    problem = steep(5.0)
    bounded = BoundedCurvature(method=pipeline(), max_curvature=15.0)
    (plain, _), (found, _) = steps(pipeline(), problem, 3), steps(bounded, problem, 3)
    assert found["lower_scale"] == 1.0
    assert_same(
        {"t": found["theta"]["t"], "x": found["x"]["x"]},
        {"t": plain["theta"]["t"], "x": plain["x"]["x"]},
        rtol=0,
    )
    assert found["cost"]["lower_gradients"] == plain["cost"]["lower_gradients"] + 40


def test_steps_are_the_steps_at_a_smaller_rate() -> None:
    """Rate η on c·g moves x as the rate c·η on g; the hypergradient and the record are those of
    g.
    """
    problem = steep(100.0)
    found, record = steps(BoundedCurvature(method=pipeline(), max_curvature=15.0), problem, 5)
    scale = found["lower_scale"]
    assert scale == pytest.approx(0.15, rel=0.05)
    plain, expected = steps(pipeline(lr=0.1 * scale), problem, 5)
    assert_same(found["theta"]["t"], plain["theta"]["t"], rtol=1e-10)
    for name in ("lower_loss", "lower_gradient_norm", "hypergradient_norm", "upper_loss"):
        assert_same(record[name], expected[name], rtol=1e-8)


def stiffening() -> Problem:
    """The lower Hessian is 1 + exp θ, and F = −2 Σ log(1 + exp θ): each step increases it."""

    def g(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        penalty = (theta["t"].exp() * x["x"].square()).sum()
        return 0.5 * (x["x"] - 1).square().sum() + 0.5 * penalty

    return Problem(
        theta0={"t": torch.zeros(3, dtype=F64)},
        x0={"x": torch.ones(3, dtype=F64)},
        g=g,
        f=lambda theta, x, batch: x["x"].square().log().sum(),
    )


def stiff_pipeline() -> Pipeline:
    return evolve(pipeline(), outer=Adam(lr=0.1))


def test_the_bound_follows_a_curvature_that_theta_raises() -> None:
    problem = stiffening()
    method = BoundedCurvature(method=stiff_pipeline(), max_curvature=15.0)
    before, _ = steps(method, problem, 79)
    state, _ = method.step(problem, before)
    curvature = 1 + float(state["theta"]["t"].max().exp())
    assert curvature > 100
    assert 0.5 < 0.1 * state["lower_scale"] * curvature < 2
    assert_same(state["x"]["x"], 1 / (1 + before["theta"]["t"].exp()), rtol=1e-2)
    measured = (state["cost"]["lower_gradients"] - 80 * gradients_of_a_step()) / 40
    assert 2 <= measured <= 8
    plain, _ = steps(stiff_pipeline(), problem, 80)
    assert not bool((plain["x"]["x"].abs() < 1e6).all())


def gradients_of_a_step() -> int:
    state, _ = steps(pipeline(), stiffening(), 1)
    return state["cost"]["lower_gradients"]


def test_a_larger_gradient_at_the_same_curvature_changes_nothing_but_the_next_limit() -> None:
    problem = steep(100.0)
    method = BoundedCurvature(method=pipeline(), max_curvature=15.0)
    state, _ = steps(method, problem, 2)
    one = torch.ones((), dtype=F64)
    shown = {"smallest_norm": one, "lower_norm": 2.1 * one}
    following, _ = method.step(problem, {**state, **shown})
    expected, _ = method.step(problem, state)
    assert following["lower_scale"] == state["lower_scale"]
    assert following["growth"] == 2 * state["growth"]
    assert_same(following["theta"]["t"], expected["theta"]["t"], rtol=0)
    extra = following["cost"]["lower_gradients"] - expected["cost"]["lower_gradients"]
    assert extra == 40


def test_a_stored_state_continues_with_its_limits() -> None:
    problem = stiffening()
    method = BoundedCurvature(method=stiff_pipeline(), max_curvature=15.0)
    state, _ = steps(method, problem, 40)
    state = unpack(*pack(state))
    for _ in range(30):
        state, _ = method.step(problem, state)
    expected, _ = steps(method, problem, 70)
    assert state["lower_scale"] == expected["lower_scale"] < 1
    assert_same(state["theta"]["t"], expected["theta"]["t"], rtol=0)


def test_the_whole_tilted_loss_is_bounded() -> None:
    """A tilt in the same table is inside: the scale applies to g + εf."""
    method = {"name": "soba", "tilt": 1000.0}
    table = {"task": "quadratic", "method": method, "budget": "1 steps"}
    state = RunConfig.from_dict(table).method.init(steep(5.0), 0)
    assert state["lower_scale"] == pytest.approx(15 / 2005, rel=0.05)


def test_a_state_that_was_stored_continues_with_its_scale() -> None:
    problem, method = steep(100.0), BoundedCurvature(method=pipeline(), max_curvature=15.0)
    state, _ = steps(method, problem, 2)
    following, _ = method.step(problem, unpack(*pack(state)))
    expected, _ = steps(method, problem, 3)
    assert_same(following["theta"]["t"], expected["theta"]["t"], rtol=0)


def test_abilities_of_the_loss_remain() -> None:
    composite = Composite(
        outputs=lambda x, batch: x["x"], criterion=lambda theta, x, z, batch: (z * z).sum()
    )
    data = Data.of({"a": torch.zeros(4)})
    problem = evolve(steep(1.0), g=composite, lower_data=data).with_extensions(
        Rows(leaf="t", losses=lambda x, batch: x["x"], regulariser=lambda t, x, b: x["x"].sum())
    )
    scaled = scaled_problem(problem, 0.5)
    loss = find(scaled.g, HasOutputs)
    assert loss is not None
    x = problem.x0
    assert_same(loss.criterion({}, x, loss.outputs(x, {}), {}), composite({}, x, {}) / 2)
    rows = scaled.find(Rows)
    assert rows is not None
    assert_same(rows.losses(x, {}), x["x"] / 2)
    assert_same(rows.regulariser({}, x, {}), x["x"].sum() / 2)
    assert find(scaled.g, StacksCandidates) is None


class Stacking:
    capabilities = frozenset({StacksCandidates})

    def stacked_losses(self, theta: Tree, x: Tree, batch: Tree, own_batch: bool) -> torch.Tensor:
        return x["x"].sum(-1)


def test_a_loss_that_stacks_candidates_still_does() -> None:
    loss = find(Scaled(Stacking(), 0.5), StacksCandidates)
    assert loss is not None
    assert_same(loss.stacked_losses({}, {"x": torch.ones(3, 4)}, {}, False), torch.full((3,), 2.0))


@pytest.mark.parametrize("name", FIXED_RATES)
def test_methods_with_fixed_rates_improve_a_steep_lower_level(name: str) -> None:
    """2/L is 0.0067: a tenth of the smallest of their rates."""
    problem = steep(300.0)
    result = hgms.run(name, problem, "40 steps", seed=0)
    x = result.x["x"]
    assert bool(x.isfinite().all())
    assert float((x - 1).square().sum()) < float((problem.x0["x"] - 1).square().sum())
