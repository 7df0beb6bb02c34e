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
from torch import Tensor, nn

from hgms.integrations.lower_solution import lower_solution
from hgms_core import CallableSolver, LinearSystem, Outcome, Solution, Tree, hypergradient

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


@pytest.mark.parametrize(
    ("strategy", "rtol"), [("vjp", 1e-12), ("jvp", 1e-12), ("difference", 1e-6)]
)
def test_it_is_hypergradient_on_dictionaries(strategy: Any, rtol: float) -> None:
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
    assert_same(
        {name: leaf.grad for name, leaf in theta.items()}, expected, rtol=rtol, atol=1e-3 * rtol
    )


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


def test_theta_shared_by_two_lower_levels_adds_up() -> None:
    theta = normal(3, seed=4).requires_grad_()
    one = lower_solution(quadratic, theta, minimiser(theta), solver=dense)
    two = solved(theta)
    ((one @ B) * two.sum()).backward()
    jacobian = torch.autograd.functional.jacobian(solved, theta.detach())
    expected = C.T @ torch.linalg.solve(A, B) * two.detach().sum() + (
        one.detach() @ B
    ) * jacobian.sum(0)
    torch.testing.assert_close(theta.grad, expected, rtol=1e-11, atol=1e-12)


def test_several_outputs_are_differentiated_one_by_one() -> None:
    """One leaf of x alone, then the other, through one graph: the two rows of the Jacobian."""
    whole = spd(5, seed=6)

    def g(theta: Tensor, x: Tree) -> Tensor:
        flat = torch.cat([x["a"], x["b"]])
        return 0.5 * flat @ whole @ flat - flat @ theta

    theta = normal(5, seed=9).requires_grad_()
    best = torch.linalg.solve(whole, theta.detach())
    x = lower_solution(g, theta, {"a": best[:2], "b": best[2:]}, solver=dense)
    inverse = torch.linalg.inv(whole)
    for output, row in ((x["a"][0], inverse[0]), (x["b"][2], inverse[4])):
        (found,) = torch.autograd.grad(output, theta, retain_graph=True)
        torch.testing.assert_close(found, row, rtol=1e-11, atol=1e-12)


def test_between_two_layers_of_a_network() -> None:
    """The minimiser of a loss with learned parameters, fed by the layer below."""
    below, above = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
    pull = nn.Parameter(torch.tensor(0.3, dtype=F64))

    def loss(theta: Tree, x: Tensor) -> Tensor:
        return (0.5 * (x - theta["target"]) ** 2 + 0.5 * theta["pull"].exp() * x**2).sum()

    def inner(target: Tensor) -> Tensor:
        best = (target / (1 + pull.exp())).detach()
        return lower_solution(loss, {"target": target, "pull": pull}, best, solver=dense)

    leaves = [*below.parameters(), pull, *above.parameters()]
    found, expected = (
        torch.autograd.grad(above(layer(below(normal(3, seed=10)))).square().sum(), leaves)
        for layer in (inner, lambda target: target / (1 + pull.exp()))
    )
    assert_same(found, expected, rtol=1e-11, atol=1e-12)


def test_constants_in_theta_may_be_whole_numbers() -> None:
    theta = {"a": normal(3).requires_grad_(), "rows": torch.tensor([2, 0])}

    def g(upper: Tree, x: Tensor) -> Tensor:
        return (0.5 * (x - upper["a"][upper["rows"]]) ** 2).sum()

    x = lower_solution(g, theta, theta["a"].detach()[[2, 0]], solver=dense)
    (x @ torch.tensor([1.0, 5.0], dtype=F64)).backward()
    assert_same(theta["a"].grad, torch.tensor([5.0, 0.0, 1.0], dtype=F64), rtol=1e-12)


def test_what_needs_no_gradient_is_not_solved_and_a_graph_in_x_is_cut() -> None:
    def never(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        raise AssertionError("it was solved")

    theta = normal(3)
    start = minimiser(theta).requires_grad_()
    assert not lower_solution(quadratic, theta, start.detach(), solver=never).requires_grad
    theta.requires_grad_()
    with torch.no_grad():
        assert not lower_solution(quadratic, theta, start, solver=never).requires_grad
    x = lower_solution(quadratic, theta, 1.0 * start, solver=lambda matvec, b: b * 0)
    assert torch.autograd.grad(x.sum(), start, allow_unused=True) == (None,)


class Limited:
    """Gives up at the start."""

    name = "limited"

    def solve(self, matvec: Any, b: Tensor, x0: Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b)
        x, residual = system.start(x0)
        codes = system.codes(Outcome.ITERATION_LIMIT)
        iterations, curvature = torch.zeros_like(codes), torch.ones_like(system.size)
        return system.solution(x, system.norm(residual), codes, iterations, curvature)


def test_the_report_is_the_solution_of_every_solve() -> None:
    reports: list[tuple[Solution, Tensor]] = []
    how = {"solver": Limited(), "report": lambda *of: reports.append(of)}
    theta = normal(3).requires_grad_()
    best = minimiser(theta)
    x = lower_solution(quadratic, theta, best, **how)
    assert reports == []
    (x @ B).backward()
    assert [solution.outcome for solution, _ in reports] == [Outcome.ITERATION_LIMIT]
    assert reports[0][1] < 1e-12  # at the minimiser
    assert not theta.grad.any()  # v = 0, as reported
    warm = torch.linalg.solve(A, B)
    (lower_solution(quadratic, theta, best, v0=warm, **how) @ B).backward()
    torch.testing.assert_close(theta.grad, C.T @ warm, rtol=1e-12, atol=1e-13)
    (lower_solution(quadratic, theta, best + 1, **how) @ B).backward()
    # ∇_x g = A (x − x*)
    expected = (A @ torch.ones_like(B)).norm()
    torch.testing.assert_close(reports[2][1], expected, rtol=1e-9, atol=0)


def test_x_is_not_copied_and_a_change_of_it_before_the_way_back_is_noticed() -> None:
    theta = normal(3).requires_grad_()
    best = minimiser(normal(3))
    before = best.clone()
    x = lower_solution(quadratic, theta, best, solver=dense)
    assert x.data_ptr() == best.data_ptr()
    assert not best.requires_grad
    loss = (x * B).sum()
    assert_same(best, before)
    best.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
