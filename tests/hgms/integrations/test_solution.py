"""The lower solution as a node of a graph: the gradients of closed forms, of `hypergradient` and
of differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, finite_differences, network_problem, normal, spd
from support.solver_systems import dense, newton
from torch import Tensor

from hgms.adapters import hypergradient
from hgms.integrations.lower_solution import lower_solution
from hgms_core import CallableSolver, Outcome, Solution, Tree

A = spd(4, seed=1)
C = normal(4, 3, seed=2)
B = normal(4, seed=3)


def ridged(ridge: float) -> CallableSolver:
    return CallableSolver(lambda matvec, b: dense(lambda v: matvec(v) + ridge * v, b))


def quadratic(theta: Tensor, x: Tensor) -> Tensor:
    """½xᵀAx − xᵀCθ: x*(θ) = A⁻¹Cθ."""
    return 0.5 * x @ A @ x - x @ C @ theta


def minimiser(theta: Tensor) -> Tensor:
    return torch.linalg.solve(A, C @ theta.detach())


def quartic(theta: Tensor, x: Tensor) -> Tensor:
    """Σ ½(x − θ²)² + ¼x⁴ + a coupling: strongly convex, neither quadratic in x nor linear in θ."""
    return (0.5 * (x - theta**2) ** 2 + 0.25 * x**4).sum() + 0.1 * (x[1:] - x[:-1]).pow(2).sum()


def solved(theta: Tensor) -> Tensor:
    at = theta.detach()
    best = newton(lambda x: quartic(at, x), torch.zeros_like(at), steps=12)
    return lower_solution(quartic, theta, best, solver=dense)


@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_the_gradient_is_that_of_the_closed_form_with_the_ridge_of_the_solver(ridge: float) -> None:
    theta = normal(3).requires_grad_()
    best = minimiser(theta)
    x = lower_solution(quadratic, theta, best, solver=ridged(ridge))
    (x.sin() @ B).backward()
    expected = C.T @ torch.linalg.solve(A + ridge * torch.eye(4, dtype=F64), best.cos() * B)
    torch.testing.assert_close(theta.grad, expected, rtol=1e-12, atol=1e-13)
    assert_same(x.detach(), best)


@pytest.mark.parametrize("strategy", ["vjp", "jvp"])
def test_it_is_hypergradient_on_dictionaries(strategy: Any) -> None:
    problem = network_problem()
    rows = problem.lower_data.whole
    upper = problem.upper_data["differentiate"].whole

    def g(theta: Tree, x: Tree) -> Tensor:
        return problem.g(theta, x, rows)

    def f(theta: Tree, x: Tree) -> Tensor:
        return problem.f(theta, x, upper)

    solver = ridged(0.5)
    expected = hypergradient(
        f, g, problem.theta0, problem.x0, solver=solver, strategy=strategy
    ).value
    theta = {name: leaf.clone().requires_grad_() for name, leaf in problem.theta0.items()}
    x = lower_solution(g, theta, problem.x0, solver=solver, strategy=strategy)
    assert list(x) == list(problem.x0)
    f(theta, x).backward()
    found = {name: leaf.grad for name, leaf in theta.items()}
    assert_same(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.extended
def test_the_gradient_of_a_loss_that_is_not_quadratic_is_that_of_differences() -> None:
    """Several uses of x, and other parameters of the graph."""

    def value(parts: Tree) -> Tensor:
        x, theta, w = solved(parts["theta"]), parts["theta"], parts["w"]
        return (x * w).sum() * theta.prod() + x.pow(3).sum() + (w**2).sum()

    parts = {"theta": normal(3, seed=4), "w": normal(3, seed=5)}
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in parts.items()}
    value(leaves).backward()
    numeric = finite_differences(lambda parts: value(parts).detach(), parts)
    assert_same({name: leaf.grad for name, leaf in leaves.items()}, numeric, rtol=1e-7, atol=1e-8)
    assert torch.autograd.gradcheck(solved, normal(3, seed=4).requires_grad_())


def test_what_needs_no_gradient_is_not_solved_and_a_graph_in_x_is_cut() -> None:
    def never(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        raise AssertionError("it was solved")

    theta = normal(3)
    start = minimiser(theta).requires_grad_()
    assert not lower_solution(quadratic, theta, start.detach(), solver=never).requires_grad
    x = lower_solution(quadratic, theta.requires_grad_(), 1.0 * start, solver=lambda _, b: b * 0)
    assert torch.autograd.grad(x.sum(), start, allow_unused=True) == (None,)


def test_the_report_is_the_solution_of_every_solve() -> None:
    """Its residual, and the norm of ∇_x g = A (x − x*)."""
    reports: list[tuple[Solution, Tensor]] = []
    theta = normal(3).requires_grad_()
    best = minimiser(theta)
    for away in (0.0, 1.0):
        x = lower_solution(
            quadratic, theta, best + away, solver=dense, report=lambda *of: reports.append(of)
        )
        (x @ B).backward()
    assert [solution.outcome for solution, _ in reports] == [Outcome.CONVERGED] * 2
    expected = torch.stack([torch.zeros((), dtype=F64), A.sum(1).norm()])
    torch.testing.assert_close(torch.stack([norm for _, norm in reports]), expected)


def test_x_is_not_copied_and_a_change_of_it_before_the_way_back_is_noticed() -> None:
    theta = normal(3).requires_grad_()
    best = minimiser(theta)
    x = lower_solution(quadratic, theta, best, solver=dense)
    assert (x.data_ptr(), best.requires_grad) == (best.data_ptr(), False)
    loss = (x * B).sum()
    best.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
