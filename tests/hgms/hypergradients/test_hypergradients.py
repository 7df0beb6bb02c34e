"""Hypergradient estimators against finite differences, double backward and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.conformance import faults
from support.helpers import F64, KEY, assert_same, finite_differences, network_problem, normal
from torch import Tensor

from hgms.adapters import from_losses
from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Aligned, Carried, Fixed, Implicit, OneStep, ThroughStep, Unrolled
from hgms.optim import SGD, AdamW, Clip, Cosine
from hgms.solvers import CG, Neumann
from hgms.tasks.quadratic import Quadratic
from hgms_core import Branch, CallableSolver, Candidates, Cost, Problem, State, Tree

PROBLEM = network_problem(rows=12)
THETA = PROBLEM.theta0
VALIDATION = PROBLEM.upper_data["differentiate"].whole


def at(x: Tree) -> Branch:
    return Branch(x=x, replay=lambda theta, last: pytest.fail("this estimator replays nothing"))


class Replayable:
    """A generator with a start that has history, so that moments and step counts matter."""

    def __init__(self, generator: Any, problem: Problem = PROBLEM) -> None:
        self.generator = generator
        self.problem = problem
        first = generator.init(problem, KEY)
        found = generator.propose(problem, problem.theta0, first, KEY.fold("before"))
        key = KEY.fold("carry")
        self.start: State = generator.carry(first, found, torch.tensor(0), key, problem)

    def proposed(self, theta: Tree) -> Candidates:
        return self.generator.propose(self.problem, theta, self.start, KEY)  # type: ignore[no-any-return]

    def branch(self, index: int) -> Branch:
        return self.proposed(self.problem.theta0).branch(torch.tensor(index))


TWO: dict[str, Any] = {"count": 2, "steps": 4, "batch_size": 5}
PATHS: dict[str, Any] = {
    "sgd": Branches(
        **TWO, optimizer=SGD(lr=0.4, weight_decay=0.05), diversity=Diversity(noise=0.1)
    ),
    "momentum": Branches(**TWO, optimizer=SGD(lr=0.4, momentum=0.8, schedule=Cosine(floor=0.1))),
    "adamw": Branches(
        **TWO, optimizer=AdamW(lr=0.05, weight_decay=0.1), diversity=Diversity(lr_spread=(0.5, 2.0))
    ),
    "clipped": Branches(count=2, steps=4, optimizer=Clip(optimizer=SGD(lr=2.0), clip=0.05)),
}


@pytest.mark.parametrize("path", PATHS)
def test_full_unrolling_is_the_slope_of_the_unrolled_value(path: str) -> None:
    run = Replayable(PATHS[path])
    expected = finite_differences(
        lambda theta: PROBLEM.f(theta, run.proposed(theta).at(1), VALIDATION), THETA
    )
    found, state = Unrolled().estimate(PROBLEM, THETA, *run.branch(1).as_candidates(), KEY, {})
    assert_same(found.value, expected, rtol=1e-5, atol=1e-9)
    upper = PROBLEM.f(THETA, run.proposed(THETA).at(1), VALIDATION)
    assert_same(found.upper_loss, upper, rtol=1e-10)
    assert (state, found.outcome.name) == ({}, "NOT_SOLVED")


@pytest.mark.parametrize(
    ("path", "last"), [("sgd", 1), ("momentum", 3), ("adamw", 1), ("clipped", 3)]
)
def test_truncated_unrolling_freezes_the_early_steps(path: str, last: int) -> None:
    generator = PATHS[path]
    run = Replayable(generator)
    calls: list[int] = []

    def value(theta: Tree) -> Tensor:
        # The value as a function of θ in the last steps only: the early ones see θ0, counted call
        # by call.
        def g(_theta: Tree, x: Tree, batch: Tree) -> Tensor:
            calls.append(1)
            return PROBLEM.g(THETA if len(calls) <= 4 - last else theta, x, batch)

        frozen = from_losses(
            theta0=THETA, x0=PROBLEM.x0, g=g, f=PROBLEM.f, lower_data=PROBLEM.lower_data
        )
        candidates = generator.propose(frozen, THETA, run.start, KEY)
        calls.clear()
        leaves = {name: leaf.detach() for name, leaf in theta.items()}
        end, _ = candidates.replay(torch.tensor(1), leaves, 4)
        return PROBLEM.f(theta, {name: leaf.detach() for name, leaf in end.items()}, VALIDATION)

    found, _ = Unrolled(last=last).estimate(PROBLEM, THETA, *run.branch(1).as_candidates(), KEY, {})
    assert_same(found.value, finite_differences(value, THETA), rtol=1e-5, atol=1e-9)
    assert not any(leaf.requires_grad for leaf in found.value.values())


@pytest.mark.parametrize("derivative", ["exact", "difference"])
@pytest.mark.parametrize("size", [None, 5])
def test_one_step_is_double_backward(derivative: Any, size: int | None) -> None:
    estimator = OneStep(lr=0.7, derivative=derivative, batch_size=size, upper_batch_size=size)
    found, _ = estimator.estimate(PROBLEM, THETA, *at(PROBLEM.x0).as_candidates(), KEY, {})
    below, below_rows = PROBLEM.lower_data.sample(KEY.fold("lower"), size)
    above, above_rows = PROBLEM.upper_data["differentiate"].sample(KEY.fold("upper"), size)
    theta, x = (
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        for tree in (THETA, PROBLEM.x0)
    )
    slopes = torch.autograd.grad(PROBLEM.g(theta, x, below), list(x.values()), create_graph=True)
    moved = {name: x[name] - 0.7 * slope for name, slope in zip(x, slopes, strict=True)}
    loss = PROBLEM.f(theta, moved, above)
    expected = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))
    assert_same(found.value, expected, rtol=1e-11 if derivative == "exact" else 1e-7, atol=1e-12)
    length = torch.cat([slope.detach().reshape(-1) for slope in slopes]).norm()
    assert_same(found.upper_loss, loss.detach(), rtol=1e-12)
    assert_same(found.lower_gradient_norm, length, rtol=1e-12)
    rows = (2 if derivative == "exact" else 3) * below_rows + above_rows
    assert found.cost == Cost(lower_gradients=1, upper_gradients=1, cross_products=1, rows=rows)


# --- implicit

TASK = Quadratic(features=6)
CPU = torch.device("cpu")
RIDGE, EXACT = TASK.problem(0, CPU, F64), TASK.closed_form(0, CPU, F64)


def dense(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    columns = [matvec(e) for e in torch.eye(len(b), dtype=b.dtype)]
    return torch.linalg.solve(torch.stack(columns, dim=1), b)


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
@pytest.mark.parametrize("solver", [CallableSolver(dense), CG(rtol=1e-12)], ids=["dense", "cg"])
def test_implicit_is_the_closed_form_on_ridge(strategy: Any, solver: Any) -> None:
    theta = {"log_penalty": normal(6, seed=3) - 1}
    estimator = Implicit(solver=solver, strategy=strategy)
    branch = at(EXACT.solution(theta))
    found, state = estimator.estimate(
        RIDGE, theta, *branch.as_candidates(), KEY, estimator.init(RIDGE)
    )
    rtol = 1e-7 if strategy == "difference" else 1e-10
    assert_same(found.value, EXACT.hypergradient(theta), rtol=rtol, atol=1e-12)
    assert float(found.lower_gradient_norm) < 1e-12  # type: ignore[arg-type]
    assert state == {"v": None}


def test_implicit_is_the_limit_of_unrolling() -> None:
    branch = Replayable(Branches(count=1, steps=200, optimizer=SGD(lr=0.8)), RIDGE).branch(0)
    found, _ = Unrolled().estimate(RIDGE, RIDGE.theta0, *branch.as_candidates(), KEY, {})
    assert_same(found.value, EXACT.hypergradient(RIDGE.theta0), rtol=1e-9)


def test_a_warm_start_saves_products() -> None:
    task = Quadratic(features=40, condition=1e3)
    problem, exact = task.problem(0, CPU, F64), task.closed_form(0, CPU, F64)
    estimator = Implicit(solver=CG(rtol=1e-7), warm_start=True)

    def estimate(theta: Tree, state: State) -> tuple[Any, State]:
        return estimator.estimate(
            problem, theta, *at(exact.solution(theta)).as_candidates(), KEY, state
        )

    cold, state = estimate(problem.theta0, estimator.init(problem))
    warm, again = estimate(problem.theta0, state)
    assert_same((state["v"], again["v"]), (cold.solution.value, state["v"]), rtol=1e-12)
    nudged = {"log_penalty": problem.theta0["log_penalty"] + 1e-3}
    near, _ = estimate(nudged, state)
    assert (
        0
        == int(warm.solution.iterations)
        < int(near.solution.iterations)
        < int(cold.solution.iterations)
    )
    assert warm.cost.products < cold.cost.products
    assert_same(near.value, exact.hypergradient(nudged), rtol=1e-6, atol=1e-9)


def test_every_product_uses_a_fresh_batch_where_that_is_asked_for() -> None:
    seen: set[tuple[int, ...]] = set()

    def g(theta: Any, x: Any, batch: Any) -> Tensor:
        seen.add(tuple(batch["index"].tolist()))
        return PROBLEM.g(theta, x, batch)

    estimator = Implicit(solver=Neumann(lr=0.1, steps=4), batches="fresh", batch_size=6)
    estimator.estimate(
        evolve(PROBLEM, g=g), THETA, *at(PROBLEM.x0).as_candidates(), KEY, {"v": None}
    )
    assert len(seen) >= 5  # four products and the mixed term


# --- all of them


def test_costs_count_batches_products_and_the_way_back() -> None:
    solver = CG(rtol=1e-8, ridge=1.0)
    implicit = Implicit(solver=solver, batch_size=7, upper_batch_size=4)
    found: Any = implicit.estimate(
        PROBLEM, THETA, *at(PROBLEM.x0).as_candidates(), KEY, implicit.init(PROBLEM)
    )[0]
    products = found.solution.products
    one = Cost(lower_gradients=1, upper_gradients=1, cross_products=1)
    assert found.cost == one + Cost(products=products, rows=4 + 7 * (2 + products))
    assert float(found.solution.curvature) > 0
    branch = Replayable(PATHS["sgd"]).branch(0)
    for through, last in ((4, None), (2, 2), (4, 9)):
        unrolled = Unrolled(last=last, upper_batch_size=4)
        assert unrolled.estimate(PROBLEM, THETA, *branch.as_candidates(), KEY, {})[0].cost == Cost(
            lower_gradients=4,
            products=through,
            cross_products=through,
            upper_gradients=1,
            rows=5 * (4 + 2 * through) + 4,
        )


@pytest.mark.parametrize(
    "estimator", [Fixed(), ThroughStep(), Aligned(), Carried()], ids=lambda e: e.name
)
def test_an_estimator_passes_the_checks_of_the_kit(estimator: Any) -> None:
    assert faults(estimator) == {}
