"""Hypergradient estimators against finite differences, double backward and closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import (
    F64,
    KEY,
    assert_same,
    finite_differences,
    network_problem,
    normal,
    rejects,
    spd,
)
from support.source_problems import convex_sources, network_sources
from torch import Tensor

from hgms.generators.branches import Branches
from hgms.generators.ula import Ula
from hgms.hypergradients import Fixed, Implicit, OneStep, ThroughStep, Unrolled
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.tasks.quadratic import Quadratic
from hgms_core import (
    Branch,
    CallableSolver,
    Candidates,
    Cost,
    Data,
    Estimate,
    HyperGradient,
    LastStep,
    Outcome,
    Pipeline,
    Problem,
    State,
    Tree,
    norm,
)

PROBLEM = network_problem(rows=12)
SOURCES = network_sources()
THETA = PROBLEM.theta0
VALIDATION = PROBLEM.upper_data["differentiate"].whole


def dense(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    return torch.linalg.solve(
        torch.stack([matvec(e) for e in torch.eye(len(b), dtype=b.dtype)], dim=1), b
    )


def never(theta: Tree, last: int | None) -> tuple[Tree, Cost]:
    raise AssertionError("this estimator replays nothing")


def at(x: Tree) -> Branch:
    return Branch(x=x, replay=never)


class Replayable:
    """A generator with a start that has history, so that moments and step counts matter."""

    def __init__(self, generator: Any, problem: Problem = PROBLEM) -> None:
        self.generator = generator
        self.problem = problem
        first = generator.init(problem, KEY)
        found = generator.propose(problem, problem.theta0, first, KEY.fold("before"))
        self.start: State = generator.carry(
            first, found, torch.tensor(0), KEY.fold("carry"), problem
        )

    def propose(self, theta: Tree, index: int) -> Tree:
        found: Candidates = self.generator.propose(self.problem, theta, self.start, KEY)
        return found.at(index)

    def branch(self, index: int) -> Branch:
        candidates: Candidates = self.generator.propose(
            self.problem, self.problem.theta0, self.start, KEY
        )
        return candidates.branch(torch.tensor(index))


PATHS: dict[str, Any] = {
    "sgd": Branches(count=2, steps=4, lr=0.5, batch_size=5, noise=0.1, weight_decay=0.05),
    "momentum": Branches(
        count=2, steps=4, lr=0.4, momentum=0.8, batch_size=5, schedule="cosine", floor=0.1
    ),
    "adamw": Branches(
        count=2,
        steps=4,
        optimizer="adamw",
        lr=0.05,
        batch_size=5,
        weight_decay=0.1,
        lr_spread=(0.5, 2.0),
    ),
    "clipped": Branches(count=2, steps=4, lr=2.0, clip=0.05),
    "ula": Ula(count=2, steps=4, lr=0.3, temperature=1e-2, carry_rule="selected"),
}
every_path = pytest.mark.parametrize("path", PATHS)


@every_path
def test_full_unrolling_is_the_slope_of_the_unrolled_value(path: str) -> None:
    run = Replayable(PATHS[path])
    expected = finite_differences(
        lambda theta: PROBLEM.f(theta, run.propose(theta, 1), VALIDATION), THETA
    )
    found, state = Unrolled().estimate(PROBLEM, THETA, run.branch(1), KEY, {})
    assert_same(found.value, expected, rtol=1e-5, atol=1e-9)
    assert_same(found.upper_loss, PROBLEM.f(THETA, run.propose(THETA, 1), VALIDATION), rtol=1e-10)
    assert state == {}
    assert found.outcome is Outcome.NOT_SOLVED


@every_path
@pytest.mark.parametrize("last", [1, 2, 3])
def test_truncated_unrolling_freezes_the_early_steps(path: str, last: int) -> None:
    generator = PATHS[path]
    run = Replayable(generator)
    calls = 0

    def value(theta: Tree) -> Tensor:
        # The value as a function of θ in the last steps only: the early ones see θ0, counted call
        # by call.
        nonlocal calls
        calls = 0

        def g(_theta: Tree, x: Tree, batch: Tree) -> Tensor:
            nonlocal calls
            calls += 1
            return PROBLEM.g(THETA if calls <= generator.steps - last else theta, x, batch)

        frozen = Problem(
            theta0=THETA, x0=PROBLEM.x0, g=g, f=PROBLEM.f, lower_data=PROBLEM.lower_data
        )
        leaves = {name: leaf.detach() for name, leaf in theta.items()}
        candidates = generator.propose(frozen, THETA, run.start, KEY)
        calls = 0
        end, _ = candidates.replay(torch.tensor(1), leaves, generator.steps)
        return PROBLEM.f(theta, {name: leaf.detach() for name, leaf in end.items()}, VALIDATION)

    found, _ = Unrolled(last=last).estimate(PROBLEM, THETA, run.branch(1), KEY, {})
    assert_same(found.value, finite_differences(value, THETA), rtol=1e-5, atol=1e-9)
    assert not any(leaf.requires_grad for leaf in found.value.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_leaf_without_gradient_gives_no_nan(optimizer: str, clip: float | None) -> None:
    # At the minimum of g all moments are zero: √v and the norm have no derivative there.
    problem = Problem(
        theta0={"t": normal(2)},
        x0={"x": torch.zeros(2, dtype=F64), "unused": torch.zeros(1, dtype=F64)},
        g=lambda t, x, _: 0.5 * (x["x"] * t["t"]).square().sum(),
        f=lambda t, x, _: (x["x"] - 1).square().sum(),
    )
    run = Replayable(Branches(count=1, steps=3, optimizer=optimizer, clip=clip), problem)
    found, _ = Unrolled().estimate(problem, problem.theta0, run.branch(0), KEY, {})
    assert_same(found.value, {"t": torch.zeros(2, dtype=F64)})


def test_unrolling_where_theta_does_not_matter_is_zero() -> None:
    problem = Problem(
        theta0={"t": normal(2)},
        x0={"x": normal(2)},
        g=lambda t, x, _: x["x"].square().sum(),
        f=lambda t, x, _: x["x"].sum(),
    )
    found, _ = Unrolled().estimate(
        problem, problem.theta0, Replayable(Branches(count=1), problem).branch(0), KEY, {}
    )
    assert_same(found.value, {"t": torch.zeros(2, dtype=F64)})


@pytest.mark.parametrize("derivative", ["exact", "difference"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_one_step_is_double_backward(derivative: str, batch_size: int | None) -> None:
    estimator = OneStep(
        lr=0.7, derivative=derivative, batch_size=batch_size, upper_batch_size=batch_size
    )
    found, _ = estimator.estimate(PROBLEM, THETA, at(PROBLEM.x0), KEY, {})

    lower = PROBLEM.lower_data
    upper = PROBLEM.upper_data["differentiate"]
    below = lower.draw(KEY.fold("lower"), batch_size, 1)
    above = upper.draw(KEY.fold("upper"), batch_size, 1)
    theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
    value = PROBLEM.g(theta, x, lower.batch(None if below is None else below[0]))
    slopes = torch.autograd.grad(value, list(x.values()), create_graph=True)
    moved = {
        name: leaf - 0.7 * slope for (name, leaf), slope in zip(x.items(), slopes, strict=True)
    }
    loss = PROBLEM.f(theta, moved, upper.batch(None if above is None else above[0]))
    expected = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))

    assert_same(found.value, expected, rtol=1e-11 if derivative == "exact" else 1e-7, atol=1e-12)
    assert_same(found.upper_loss, loss.detach(), rtol=1e-12)
    assert_same(
        found.lower_gradient_norm,
        norm({str(i): slope.detach() for i, slope in enumerate(slopes)}),
        rtol=1e-12,
    )
    rows = (batch_size or 12, batch_size or 15)
    passes = 2 if derivative == "exact" else 3
    assert found.cost == Cost(
        lower_gradients=1, upper_gradients=1, cross_products=1, rows=passes * rows[0] + rows[1]
    )


RIDGE = Quadratic(features=6)
CPU = torch.device("cpu")


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
@pytest.mark.parametrize("solver", [CallableSolver(dense), CG(rtol=1e-12)], ids=["dense", "cg"])
def test_implicit_is_the_closed_form_on_ridge(strategy: Any, solver: Any) -> None:
    problem = RIDGE.problem(0, CPU, F64)
    exact = RIDGE.closed_form(0, CPU, F64)
    theta = {"log_penalty": normal(6, seed=3) - 1}
    found, state = Implicit(solver=solver, strategy=strategy).estimate(
        problem, theta, at(exact.solution(theta)), KEY, Implicit(solver=solver).init(problem)
    )
    assert_same(
        found.value,
        exact.hypergradient(theta),
        rtol=1e-7 if strategy == "difference" else 1e-10,
        atol=1e-12,
    )
    assert found.lower_gradient_norm is not None
    assert found.lower_gradient_norm < 1e-12
    assert state == {"v": None}


def test_implicit_is_the_limit_of_unrolling() -> None:
    problem = RIDGE.problem(0, CPU, F64)
    exact = RIDGE.closed_form(0, CPU, F64)
    run = Replayable(Branches(count=1, steps=200, lr=0.8), problem)
    found, _ = Unrolled().estimate(problem, problem.theta0, run.branch(0), KEY, {})
    assert_same(found.value, exact.hypergradient(problem.theta0), rtol=1e-9)


def test_a_warm_start_saves_products() -> None:
    task = Quadratic(features=40, condition=1e3)
    problem = task.problem(0, CPU, F64)
    exact = task.closed_form(0, CPU, F64)
    estimator = Implicit(solver=CG(rtol=1e-7), warm_start=True)
    branch = at(exact.solution(problem.theta0))
    cold, state = estimator.estimate(problem, problem.theta0, branch, KEY, estimator.init(problem))
    warm, again = estimator.estimate(problem, problem.theta0, branch, KEY, state)
    assert cold.solution is not None
    assert_same(state["v"], cold.solution.value)
    assert warm.iterations == 0 < int(cold.iterations or 0)
    assert warm.cost.products < cold.cost.products
    assert_same(again["v"], state["v"], rtol=1e-12)
    nudged = {"log_penalty": problem.theta0["log_penalty"] + 1e-3}
    near, _ = estimator.estimate(problem, nudged, at(exact.solution(nudged)), KEY, state)
    assert int(near.iterations or 0) < int(cold.iterations or 0)
    assert_same(near.value, exact.hypergradient(nudged), rtol=1e-6, atol=1e-9)


def test_the_cost_of_an_implicit_estimate_counts_batches() -> None:
    estimator = Implicit(solver=CG(rtol=1e-8, ridge=1.0), batch_size=7, upper_batch_size=4)
    found, _ = estimator.estimate(PROBLEM, THETA, at(PROBLEM.x0), KEY, estimator.init(PROBLEM))
    assert found.solution is not None
    products = found.solution.products
    assert found.cost == Cost(
        upper_gradients=1,
        lower_gradients=1,
        products=products,
        cross_products=1,
        rows=4 + 7 * (2 + products),
    )
    assert found.curvature is not None
    assert float(found.curvature) > 0


@pytest.mark.parametrize(("through", "last"), [(4, None), (2, 2), (4, 9)])
def test_the_cost_of_unrolling_counts_the_replay_and_the_way_back(
    through: int, last: int | None
) -> None:
    run = Replayable(PATHS["sgd"])
    found, _ = Unrolled(last=last, upper_batch_size=4).estimate(
        PROBLEM, THETA, run.branch(0), KEY, {}
    )
    assert found.cost == Cost(
        lower_gradients=4,
        products=through,
        cross_products=through,
        upper_gradients=1,
        rows=5 * (4 + 2 * through) + 4,
    )


def test_fixed_reports_the_loss_and_leaves_theta() -> None:
    found, state = Fixed(upper_batch_size=4).estimate(PROBLEM, THETA, at(PROBLEM.x0), KEY, {})
    assert_same(found.value, {name: torch.zeros_like(leaf) for name, leaf in THETA.items()})
    data = PROBLEM.upper_data["differentiate"]
    index = data.draw(KEY.fold("upper"), 4, 1)
    assert index is not None
    assert_same(found.upper_loss, PROBLEM.f(THETA, PROBLEM.x0, data.batch(index[0])))
    assert (found.cost, state) == (Cost(upper_values=1, rows=4), {})


@pytest.mark.parametrize(
    "estimator", [Implicit(solver=CG()), OneStep(), Unrolled(), Fixed()], ids=lambda e: e.name
)
def test_estimators_keep_their_hands_off(estimator: Any) -> None:
    assert isinstance(estimator, HyperGradient)
    run = Replayable(PATHS["sgd"])
    theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    rng = torch.get_rng_state()
    branch = run.branch(1)
    found: Estimate = estimator.estimate(PROBLEM, theta, branch, KEY, estimator.init(PROBLEM))[0]
    again: Estimate = estimator.estimate(PROBLEM, theta, branch, KEY, estimator.init(PROBLEM))[0]
    assert_same(found.value, again.value)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(leaf.grad is None and leaf.requires_grad for leaf in theta.values())
    assert not any(
        leaf.requires_grad for leaf in [*found.value.values(), found.upper_loss, *branch.x.values()]
    )


def test_a_strictly_convex_system_needs_no_ridge() -> None:
    hessian = spd(4)
    problem = Problem(
        theta0={"t": normal(4)},
        x0={"x": normal(4, seed=1)},
        g=lambda t, x, _: 0.5 * x["x"] @ hessian @ x["x"] - x["x"] @ t["t"],
        f=lambda t, x, _: x["x"].square().sum(),
    )
    found, _ = Implicit(solver=CG(rtol=1e-12)).estimate(
        problem, problem.theta0, at(problem.x0), KEY, {"v": None}
    )
    assert_same(found.value["t"], torch.linalg.solve(hessian, 2 * problem.x0["x"]), rtol=1e-10)


# --- through one step, told by hand
# --------------------------------------------------------------------------------------------------


def descent(
    problem: Problem, theta: Tree, steps: int, lr: float, momentum: float
) -> tuple[Tree, LastStep]:
    """Heavy-ball SGD written out: its end as a function of θ through the last step alone, and
    that step as a LastStep.
    """
    x = dict(problem.x0)
    moments = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    data = problem.lower_data
    for step in range(steps):
        last = step == steps - 1
        batch = data.rows(KEY.fold(step).indices(data.size, 6, 1)[0])
        told = LastStep(
            x=x, batch=batch, rows=6, rate=lr, cost=Cost(lower_gradients=step, rows=6 * step)
        )
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.items()}
        at = theta if last else {name: leaf.detach() for name, leaf in theta.items()}
        slopes = torch.autograd.grad(
            problem.g(at, leaves, batch), list(leaves.values()), create_graph=last
        )
        moments = {
            name: momentum * moments[name] + slope for name, slope in zip(x, slopes, strict=True)
        }
        x = {name: leaf - lr * moments[name] for name, leaf in x.items()}
    return x, told


@pytest.mark.parametrize(
    ("problem", "derivative"),
    [
        (PROBLEM, "exact"),
        (PROBLEM, "difference"),
        *((SOURCES, way) for way in ("exact", "difference", "per-source")),
    ],
)
@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (1, 0.9), (4, 0.0), (4, 0.9)])
def test_through_a_last_step_told_by_hand_is_double_backward(
    problem: Problem, derivative: Any, steps: int, momentum: float
) -> None:
    above = problem.upper_data["differentiate"].whole
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in problem.theta0.items()}
    end, told = descent(problem, leaves, steps, 0.3, momentum)
    loss = problem.f(leaves, end, above)
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    branch = Branch(
        x={name: leaf.detach() for name, leaf in end.items()}, replay=never, last_step=lambda: told
    )
    found, state = ThroughStep(batch="own", derivative=derivative).estimate(
        problem, problem.theta0, branch, KEY, {}
    )
    assert_same(found.upper_loss, loss.detach(), rtol=1e-14)
    rtol = 1e-6 if derivative == "difference" else 1e-11
    assert_same(found.value, expected, rtol=rtol, atol=1e-3 * rtol * float(norm(expected)))
    assert state == {}
    rows = len(above["a"])
    passes = {"exact": 1, "difference": 2, "per-source": 3}[derivative]
    own = Cost(lower_gradients=3) if derivative == "per-source" else Cost(cross_products=1)
    assert found.cost == own + told.cost + Cost(upper_gradients=1, rows=rows + 6 * passes)


@pytest.mark.parametrize(
    ("problem", "derivative"),
    [
        (PROBLEM, "exact"),
        (PROBLEM, "difference"),
        *((SOURCES, way) for way in ("exact", "difference", "per-source")),
    ],
)
def test_one_step_more_on_a_fresh_batch_is_double_backward(
    problem: Problem, derivative: Any
) -> None:
    generator = Branches(
        count=3, steps=2, lr=0.3, momentum=0.9, batch_size=6, noise=0.1, lr_spread=(0.5, 2.0)
    )
    start = generator.init(problem, KEY)
    candidates = generator.propose(problem, problem.theta0, start, KEY)
    x = candidates.at(2)
    branch = evolve(candidates.branch(torch.tensor(2)), replay=never)
    found, state = ThroughStep(derivative=derivative).estimate(
        problem, problem.theta0, branch, KEY, {}
    )

    data = problem.lower_data
    above = problem.upper_data["differentiate"].whole
    drawn = data.draw(KEY.fold("lower"), 6, 1)
    assert drawn is not None
    theta = {name: leaf.clone().requires_grad_() for name, leaf in problem.theta0.items()}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    value = problem.g(theta, leaves, data.rows(drawn[0]))
    slopes = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
    moved = {
        name: leaf - 0.6 * slope for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    }
    loss = problem.f(theta, moved, above)
    expected = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))

    rtol = 1e-6 if derivative == "difference" else 1e-11
    assert_same(found.value, expected, rtol=rtol, atol=1e-3 * rtol * float(norm(expected)))
    assert_same(found.upper_loss, loss.detach(), rtol=1e-12)
    assert_same(
        found.lower_gradient_norm,
        norm({str(i): slope.detach() for i, slope in enumerate(slopes)}),
        rtol=1e-12,
    )
    passes = {"exact": 1, "difference": 2, "per-source": 3}[derivative]
    own = Cost(lower_gradients=3) if derivative == "per-source" else Cost(cross_products=1)
    rows = len(above["a"])
    assert found.cost == own + Cost(
        lower_gradients=1, upper_gradients=1, rows=rows + 6 * (1 + passes)
    )
    assert state == {}


def equal_sources() -> Problem:
    """Two sources that are the same 200 rows, in the middle of which f has its least value: f(x) =
    ½‖x‖². x is off it by twice the rows' spread."""
    problem = convex_sources({"a": 0.5, "b": 0.5}, rows=200)
    data = problem.lower_data
    table = data.whole["a"].clone()
    table[200:] = table[:200]
    whole = Data.of({**data.whole, "a": table - table.mean(0)})
    upper = Data.of({**problem.upper_data["select"].whole, "a": torch.zeros(20, 2, dtype=F64)})
    return evolve(
        problem,
        theta0={"logits": torch.tensor([1.0, -1.0], dtype=F64)},
        x0={"x": torch.tensor([0.1, 0.0], dtype=F64)},
        lower_data=evolve(whole, strata=data.strata),
        upper_data=dict.fromkeys(problem.upper_data, upper),
    )


@pytest.mark.extended
@pytest.mark.parametrize("batch", ["fresh", "own"])
def test_best_of_n_favours_the_heavier_of_two_equal_sources_only_through_its_own_batch(
    batch: Any,
) -> None:
    problem = equal_sources()
    method = Pipeline(
        generator=Branches(count=4, steps=1, lr=0.5, batch_size=4),
        selector=BestOfN(),
        hypergradient=ThroughStep(batch=batch, derivative="exact"),
        outer=Adam(lr=1e-9),  # θ stays
    )
    state = method.init(problem, 0)
    slopes = []
    for _ in range(200):
        before = method.init(problem, 0)["start"]  # x stays
        after, _ = method.step(
            problem, {**state, "start": before, "outer": method.outer.init(problem.theta0)}
        )
        slopes.append(float(after["outer"]["m"]["logits"][0] / 0.1))
        state = {**state, "step": state["step"] + 1}
    drift = torch.tensor(slopes)
    standard_error = float(drift.std()) / len(slopes) ** 0.5
    if batch == "fresh":
        # E f(x⁺) = ½(1 − η)²‖x̂‖² + ½η² V Σ ω_s², V the variance of a mean of 2 of the 200 rows:
        # least where ω is even.
        rows = problem.lower_data.whole["a"][:200]
        variance = float(rows.var(0).sum()) / 2 * (1 - 2 / 200)
        omega = problem.theta0["logits"].softmax(0)
        expected = 0.5**2 * variance * float(omega[0] * (omega[0] - omega.square().sum()))
        assert expected > 0
        assert abs(float(drift.mean()) - expected) < 3 * standard_error
    else:  # a negative slope: the first source, which is the heavier one, gets more
        assert float(drift.mean()) < -4 * standard_error


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (3, 0.9)])
def test_the_displacement_of_through_step_reaches_the_difference(
    steps: int, momentum: float
) -> None:
    end, told = descent(SOURCES, SOURCES.theta0, steps, 0.3, momentum)
    branch = Branch(
        x={name: leaf.detach() for name, leaf in end.items()}, replay=never, last_step=lambda: told
    )

    def found(displacement: float | None) -> Tensor:
        estimator = ThroughStep(batch="own", displacement=displacement)
        return estimator.estimate(SOURCES, SOURCES.theta0, branch, KEY, {})[0].value["logits"]

    exact = (
        ThroughStep(batch="own", derivative="exact")
        .estimate(SOURCES, SOURCES.theta0, branch, KEY, {})[0]
        .value["logits"]
    )
    errors = [float((found(length) - exact).norm()) for length in (0.2, 0.1, 0.05)]
    # of second order
    assert [a / b for a, b in itertools.pairwise(errors)] == pytest.approx([4, 4], rel=0.2)
    assert float((found(None) - exact).norm()) < 1e-3 * errors[-1]


@pytest.mark.parametrize(("batch", "which"), [("fresh", "next"), ("own", "last")])
def test_a_generator_that_tells_no_step_is_refused_with_what_to_do(batch: Any, which: str) -> None:
    with rejects("not-supported", "hypergradient", "batch") as caught:
        ThroughStep(batch=batch).estimate(PROBLEM, THETA, at(PROBLEM.x0), KEY, {})
    assert f"the {which} step" in caught.value.message
    told = descent(PROBLEM, THETA, 1, 0.3, 0.0)[1]
    branch = Branch(x=PROBLEM.x0, replay=never, last_step=lambda: told)
    with rejects("not-supported", "hypergradient", "derivative"):
        ThroughStep(batch="own", derivative="per-source").estimate(PROBLEM, THETA, branch, KEY, {})
