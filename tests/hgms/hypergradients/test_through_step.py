"""The derivative through one lower step, the last one or one more, against double backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import KEY, assert_same, network_problem
from support.source_problems import network_sources

from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import ThroughStep
from hgms.optim import SGD
from hgms_core import Branch, Cost, LastStep, Problem, Tree, norm

PROBLEM = network_problem(rows=12)
SOURCES = network_sources()
WAYS = [
    (PROBLEM, "exact"),
    (PROBLEM, "difference"),
    *((SOURCES, way) for way in ("exact", "difference", "per-source")),
]
every_way = pytest.mark.parametrize(("problem", "derivative"), WAYS)


def never(theta: Tree, last: int | None) -> tuple[Tree, Cost]:
    raise AssertionError("this estimator replays nothing")


def leaves_of(tree: Tree) -> Tree:
    return {name: leaf.detach().clone().requires_grad_() for name, leaf in tree.items()}


def descent(
    problem: Problem, theta: Tree, steps: int, momentum: float, lr: float = 0.3
) -> tuple[Tree, Branch]:
    """Heavy-ball SGD written out: its end as a function of θ through the last step alone, and
    the branch that tells this step.
    """
    x = dict(problem.x0)
    moments = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    for step in range(steps):
        last = step == steps - 1
        batch, _ = problem.lower_data.sample(KEY.fold(step), 6)
        cost = Cost(lower_gradients=step, rows=6 * step)
        told = LastStep(x=x, batch=batch, rows=6, rate=lr, cost=cost)
        leaves = leaves_of(x)
        at = theta if last else {name: leaf.detach() for name, leaf in theta.items()}
        slopes = torch.autograd.grad(
            problem.g(at, leaves, batch), list(leaves.values()), create_graph=last
        )
        moments = {name: momentum * moments[name] + s for name, s in zip(x, slopes, strict=True)}
        x = {name: leaf - lr * moments[name] for name, leaf in x.items()}
    end = {name: leaf.detach() for name, leaf in x.items()}
    return x, Branch(x=end, replay=never, last_step=lambda: told)


def assert_is(
    found: Any, loss: torch.Tensor, theta: Tree, problem: Problem, derivative: str, cost: Cost
) -> None:
    """The estimate is the gradient of the loss, whose graph goes back to θ."""
    expected = dict(zip(theta, torch.autograd.grad(loss, list(theta.values())), strict=True))
    rtol = 1e-6 if derivative == "difference" else 1e-11
    assert_same(found.value, expected, rtol=rtol, atol=1e-3 * rtol * float(norm(expected)))
    assert_same(found.upper_loss, loss.detach(), rtol=1e-12)
    passes = {"exact": 1, "difference": 2, "per-source": 3}[derivative]
    own = Cost(lower_gradients=3) if derivative == "per-source" else Cost(cross_products=1)
    rows = problem.upper_data["differentiate"].size + 6 * passes
    assert found.cost == own + cost + Cost(upper_gradients=1, rows=rows)


@every_way
@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.9), (4, 0.0), (4, 0.9)])
def test_through_a_last_step_told_by_hand_is_double_backward(
    problem: Problem, derivative: Any, steps: int, momentum: float
) -> None:
    theta = leaves_of(problem.theta0)
    end, branch = descent(problem, theta, steps, momentum)
    estimator = ThroughStep(batch="own", derivative=derivative)
    found, state = estimator.estimate(problem, problem.theta0, *branch.as_candidates(), KEY, {})
    loss = problem.f(theta, end, problem.upper_data["differentiate"].whole)
    cost = Cost(lower_gradients=steps - 1, rows=6 * (steps - 1))
    assert_is(found, loss, theta, problem, derivative, cost)
    assert state == {}


@every_way
def test_one_step_more_on_a_fresh_batch_is_double_backward(
    problem: Problem, derivative: Any
) -> None:
    generator = Branches(
        count=3,
        steps=2,
        optimizer=SGD(lr=0.3, momentum=0.9),
        batch_size=6,
        diversity=Diversity(noise=0.1, lr_spread=(0.5, 2.0)),
    )
    candidates = generator.propose(problem, problem.theta0, generator.init(problem, KEY), KEY)
    branch = evolve(candidates.branch(torch.tensor(2)), replay=never)
    found, state = ThroughStep(derivative=derivative).estimate(
        problem, problem.theta0, *branch.as_candidates(), KEY, {}
    )
    theta, x = leaves_of(problem.theta0), leaves_of(candidates.at(2))
    batch, _ = problem.lower_data.sample(KEY.fold("lower"), 6)
    slopes = torch.autograd.grad(problem.g(theta, x, batch), list(x.values()), create_graph=True)
    moved = {name: x[name] - 0.6 * slope for name, slope in zip(x, slopes, strict=True)}
    loss = problem.f(theta, moved, problem.upper_data["differentiate"].whole)
    assert_is(found, loss, theta, problem, derivative, Cost(lower_gradients=1, rows=6))
    length = torch.cat([slope.detach().reshape(-1) for slope in slopes]).norm()
    assert_same(found.lower_gradient_norm, length, rtol=1e-12)
    assert state == {}


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (3, 0.9)])
def test_the_displacement_reaches_the_difference(steps: int, momentum: float) -> None:
    _, branch = descent(SOURCES, SOURCES.theta0, steps, momentum)

    def found(**options: Any) -> torch.Tensor:
        estimator = ThroughStep(batch="own", **options)
        return estimator.estimate(SOURCES, SOURCES.theta0, *branch.as_candidates(), KEY, {})[
            0
        ].value["logits"]

    exact = found(derivative="exact")
    errors = [float((found(displacement=size) - exact).norm()) for size in (0.2, 0.1, 0.05)]
    # of second order
    assert [a / b for a, b in itertools.pairwise(errors)] == pytest.approx([4, 4], rel=0.2)
    assert float((found(displacement=None) - exact).norm()) < 1e-3 * errors[-1]
