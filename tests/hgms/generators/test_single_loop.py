"""SOBA: the three directions from dense derivatives, one step by hand, and where the loop ends."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from attrs import evolve
from support.field_problems import pipeline, run, sphere_gap, tuned_penalty
from support.helpers import F64, KEY, assert_same, counted, network_problem, normal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hgms.generators.branches import Branches
from hgms.generators.penalty import DynamicBarrier, GradientNorm
from hgms.generators.single_loop import Soba
from hgms.hypergradients import Carried, Implicit, Unrolled
from hgms.outer import Schedule, Sgd
from hgms.selectors import BestOfN, First
from hgms.solvers import CG
from hgms_core import Pipeline, Problem, Tree
from hgms_core.trees import Ravel

PROBLEM = network_problem()


def soba(generator: Soba, lr: float = 0.1, schedule: Schedule | None = None) -> Pipeline:
    return pipeline(generator, First(), Carried(), Sgd(lr=lr, schedule=schedule or Schedule()))


def test_one_step_by_hand() -> None:
    # g = ½θx², f = ½(x − 1)² + θ²: D_x = θx, D_v = θv + x − 1, D_θ = xv + 2θ at θ = 2, x = 3, v =
    # −1.
    one = torch.ones(1, dtype=F64)
    problem = Problem(
        theta0={"t": 2 * one},
        x0={"x": 3 * one},
        g=lambda t, x, _: 0.5 * (t["t"] * x["x"].square()).sum(),
        f=lambda t, x, _: 0.5 * (x["x"] - 1).square().sum() + t["t"].square().sum(),
    )
    method = soba(
        Soba(lr=0.1, v_lr=0.5, decay=0.5),
        lr=0.2,
        schedule=Schedule(kind="inverse", decay_steps=1, power=0.5),
    )
    state = method.init(problem, 0)
    state["start"]["v"]["x"] = -one
    state, record = method.step(problem, state)
    assert float(state["x"]["x"]) == pytest.approx(3 - 0.1 * 6)
    assert float(state["start"]["v"]["x"]) == pytest.approx(-1 - 0.5 * 0)
    assert float(state["theta"]["t"]) == pytest.approx(2 - 0.2 * 1)
    assert float(record["upper_loss"]) == 6.0
    assert float(record["lower_gradient_norm"]) == 6.0
    assert float(record["lower_loss"]) == 9.0
    # The second step: all rates are 1/√2 of the first, at θ = 1.8, x = 2.4, v = −1.
    state, _ = method.step(problem, state)
    root = 0.5**0.5
    assert float(state["x"]["x"]) == pytest.approx(2.4 - 0.1 * root * 4.32)
    assert float(state["start"]["v"]["x"]) == pytest.approx(-1 - 0.5 * root * (-1.8 + 1.4))
    assert float(state["theta"]["t"]) == pytest.approx(1.8 - 0.2 * root * (-2.4 + 3.6))


@pytest.mark.parametrize("batch_size", [None, 5])
def test_the_directions_are_those_of_the_dense_derivatives(batch_size: int | None) -> None:
    generator = Soba(lr=0.3, v_lr=0.2, batch_size=batch_size, upper_batch_size=batch_size)
    start = generator.init(PROBLEM, KEY)
    start["v"] = {
        name: normal(*leaf.shape, seed=70 + i) for i, (name, leaf) in enumerate(PROBLEM.x0.items())
    }
    found = generator.propose(PROBLEM, PROBLEM.theta0, start, KEY)

    lower = PROBLEM.lower_data
    upper = PROBLEM.upper_data["differentiate"]
    below = lower.draw(KEY.fold("lower"), batch_size, 1)
    above = upper.draw(KEY.fold("upper"), batch_size, 1)
    batch = lower.batch(None if below is None else below[0])
    rows = upper.batch(None if above is None else above[0])
    xs = Ravel.of(PROBLEM.x0)
    ts = Ravel.of(PROBLEM.theta0)
    x = xs.ravel(PROBLEM.x0)
    t = ts.ravel(PROBLEM.theta0)
    v = xs.ravel(start["v"])

    def g(t: Tensor, x: Tensor) -> Tensor:
        return PROBLEM.g(ts.unravel(t), xs.unravel(x), batch)

    def f(t: Tensor, x: Tensor) -> Tensor:
        return PROBLEM.f(ts.unravel(t), xs.unravel(x), rows)

    slope = torch.func.grad(g, 1)
    hessian = torch.func.jacrev(slope, 1)(t, x)
    mixed = torch.func.jacrev(slope, 0)(t, x)
    f_t, f_x = torch.func.grad(f, (0, 1))(t, x)
    close = {"rtol": 1e-12, "atol": 1e-14}
    assert_same(found.at(0), xs.unravel(x - 0.3 * slope(t, x)), **close)
    assert_same(
        {name: found.aux[f"v.{name}"][0] for name in PROBLEM.x0},
        xs.unravel(v - 0.2 * (hessian @ v + f_x)),
        **close,
    )
    assert_same(
        {name: found.aux[f"theta.{name}"][0] for name in PROBLEM.theta0},
        ts.unravel(mixed.T @ v + f_t),
        **close,
    )
    assert found.losses is not None
    assert float(found.losses[0]) == pytest.approx(float(g(t, x)), rel=1e-12)


def test_losses_that_miss_a_variable_or_a_second_derivative() -> None:
    one = torch.ones(2, dtype=F64)
    problem = Problem(
        theta0={"used": one, "unused": one},
        x0={"curved": one, "linear": one},
        g=lambda t, x, _: (t["used"] * x["curved"].square()).sum() + x["linear"].sum(),
        f=lambda t, x, _: x["linear"].sum(),
    )
    start = Soba().init(problem, KEY)
    start["v"] = {"curved": one, "linear": one}
    found = Soba(lr=0.1, v_lr=0.1).propose(problem, problem.theta0, start, KEY)
    assert_same(
        {name: found.aux[f"theta.{name}"][0] for name in problem.theta0},
        {"used": 2 * one, "unused": 0 * one},
    )
    assert_same(found.aux["v.linear"][0], 0.9 * one)
    assert_same(found.aux["v.curved"][0], 0.8 * one)
    # A constant upper loss and a lower loss without any curvature move v and θ nowhere.
    flat = evolve(
        problem, g=lambda t, x, _: x["linear"].sum(), f=lambda t, x, _: torch.zeros((), dtype=F64)
    )
    still = Soba(lr=0.1).propose(flat, problem.theta0, start, KEY)
    assert_same({name: still.aux[f"v.{name}"][0] for name in problem.x0}, start["v"])


def test_one_evaluation_of_each_loss_a_step() -> None:
    problem, calls = counted(PROBLEM)
    method = soba(Soba(batch_size=6, upper_batch_size=5))
    state = method.init(problem, 0)
    for _ in range(3):
        state, record = method.step(problem, state)
    assert (calls["g"], calls["f"]) == (3, 3)
    assert (calls["g_rows"], calls["f_rows"]) == (18, 15)
    assert record["oracle_calls"] == 12
    assert record["cost_rows"] == 3 * (3 * 6 + 5)


def test_replay_is_the_step_as_a_function_of_theta() -> None:
    generator = Soba(lr=0.3, batch_size=6)
    start = generator.init(PROBLEM, KEY)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.theta0.items()}
    candidates = generator.propose(PROBLEM, PROBLEM.theta0, start, KEY)
    proposed = candidates.at(0)
    replay = candidates.replay
    assert replay is not None
    x, cost = replay(torch.tensor(0), leaves, None)
    assert_same({name: leaf.detach() for name, leaf in x.items()}, proposed, rtol=1e-14)
    found = torch.autograd.grad(x["w"].sum(), leaves["scale"])[0]

    def value(scale: Tensor) -> Tensor:
        theta: Tree = {**PROBLEM.theta0, "scale": scale}
        return generator.propose(PROBLEM, theta, start, KEY).at(0)["w"].sum()

    ahead, behind = (value(PROBLEM.theta0["scale"] + sign * 1e-5) for sign in (1, -1))
    assert float(found) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)
    assert cost.lower_gradients == cost.cross_products == 1
    forward, cost = replay(torch.tensor(0), PROBLEM.theta0, None)
    assert_same(forward, proposed, rtol=1e-14)
    assert (cost.calls, cost.rows) == (1, 6)
    unrolled = pipeline(generator, First(), Unrolled(), Sgd())
    unrolled.step(PROBLEM, unrolled.init(PROBLEM, 0))


def test_without_upper_variables_the_lower_level_goes_on() -> None:
    x0 = {"x": torch.ones(2, dtype=F64)}
    problem = Problem(
        theta0={},
        x0=x0,
        g=lambda t, x, _: x["x"].square().sum() / 2,
        f=lambda t, x, _: (x["x"] - 3).square().sum() / 2,
    )
    for generator in (Soba(lr=0.25, v_lr=0.5), DynamicBarrier(lr=0.25, inner_lr=0.5, steps=2)):
        moved = generator.propose(problem, {}, generator.init(problem, KEY), KEY)
        assert float(moved.losses[0]) == 1.0
        assert not any(name.startswith("theta.") for name in moved.aux)
        if isinstance(generator, Soba):
            assert_same(moved.at(0), {"x": 0.75 * x0["x"]})
            assert_same(moved.aux["v.x"][0], torch.ones(2, dtype=F64))  # −½∇f


def test_the_ball_bounds_v() -> None:
    generator = Soba(v_lr=50.0, max_norm=2.0)
    state, _ = (method := soba(generator)).step(PROBLEM, method.init(PROBLEM, 0))
    v = state["start"]["v"]
    assert float(torch.linalg.vector_norm(Ravel.of(v).ravel(v))) == pytest.approx(2.0)


def test_a_saved_state_continues() -> None:
    method = soba(Soba(batch_size=6, upper_batch_size=5, decay=0.5))
    state = method.init(PROBLEM, 1)
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy(state)
        state, _ = method.step(PROBLEM, state)
    for _ in range(2):
        saved, _ = method.step(PROBLEM, saved)
    assert_same(saved, state)


def test_it_reaches_the_closed_form_optimum() -> None:
    problem, exact, best = tuned_penalty()
    theta, x, record = run(soba(Soba(lr=0.5, v_lr=0.5), lr=0.2), problem, 400)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=1e-6)
    assert_same(x, exact.solution(theta), rtol=1e-6, atol=1e-6)
    assert float(record["hypergradient_norm"]) < 1e-6


def test_it_does_not_select_and_falls_short_on_the_sphere() -> None:
    followed = sphere_gap(soba(Soba(lr=0.1, v_lr=0.1, max_norm=10.0), lr=0.05), 300)
    branches = Branches(count=12, steps=20, lr=0.1, noise=0.3)
    selected = sphere_gap(
        pipeline(branches, BestOfN(), Implicit(solver=CG(ridge=1e-2)), Sgd(lr=0.2)), 60
    )
    assert selected < 0.01
    assert followed > 0.05


@pytest.mark.parametrize(
    "generator",
    [Soba(lr=0.1, v_lr=0.1), GradientNorm(lr=0.1, gamma=1.0)],
    ids=lambda each: each.name,
)
def test_attention_inside_the_lower_loss_has_its_second_derivative(
    generator: Soba | GradientNorm,
) -> None:
    """The fused kernels have only the first one; the result is that of attention written out."""

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1) @ v

    def problem(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Problem:
        return Problem(
            theta0={"t": normal(1, seed=1)},
            x0={"x": normal(24, seed=2)},
            g=lambda t, x, _: (
                attention(*(3 * [x["x"].view(1, 2, 3, 4)])).square().sum() - t["t"].sum()
            ).square(),
            f=lambda t, x, _: (x["x"] - 1).square().sum(),
        )

    found, wanted = (
        soba(generator).step(one, soba(generator).init(one, 0), 0.0)[0]
        for one in (problem(scaled_dot_product_attention), problem(written_out))
    )
    assert_same(found["theta"], wanted["theta"], rtol=1e-9, atol=1e-12)
    assert_same(found["x"], wanted["x"], rtol=1e-9, atol=1e-12)
