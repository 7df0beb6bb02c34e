"""The lower solution as a node of a graph: the gradients of closed forms, of `hypergradient` and
of differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, finite_differences, network_problem, normal, spd
from torch import Tensor, nn

from hgms.integrations.lower_solution import lower_solution
from hgms_core import CallableSolver, LinearSystem, Outcome, Solution, Tree, hypergradient

A = spd(4, seed=1)
C = normal(4, 3, seed=2)
B = normal(4, seed=3)


def dense(size: int, ridge: float = 0.0) -> CallableSolver:
    """Every column of the operator, then a factorisation: exact to rounding, and unlike anything
    in the package.
    """

    def solve(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        columns = torch.stack([matvec(column) for column in torch.eye(size, dtype=b.dtype)], 1)
        return torch.linalg.solve(columns + ridge * torch.eye(size, dtype=b.dtype), b)

    return CallableSolver(solve)


def quadratic(theta: Tensor, x: Tensor) -> Tensor:
    """½xᵀAx − xᵀCθ: x*(θ) = A⁻¹Cθ."""
    return 0.5 * x @ A @ x - x @ C @ theta


def minimiser(theta: Tensor) -> Tensor:
    return torch.linalg.solve(A, C @ theta.detach())


def quartic(theta: Tensor, x: Tensor) -> Tensor:
    """Σ ½(x − θ²)² + ¼x⁴ + a coupling: strongly convex, neither quadratic in x nor linear in θ."""
    return (0.5 * (x - theta**2) ** 2 + 0.25 * x**4).sum() + 0.1 * (x[1:] - x[:-1]).pow(2).sum()


def newton(loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(60):
        slope = torch.autograd.functional.jacobian(loss, x)
        x = x - torch.linalg.solve(torch.autograd.functional.hessian(loss, x), slope)
    return x


def solved(theta: Tensor) -> Tensor:
    return lower_solution(
        quartic,
        theta,
        newton(lambda x: quartic(theta.detach(), x), torch.zeros_like(theta)),
        solver=dense(len(theta)),
    )


def test_the_gradient_is_that_of_the_closed_form() -> None:
    theta = normal(3).requires_grad_()
    x = lower_solution(quadratic, theta, minimiser(theta), solver=dense(4))
    assert_same(x.detach(), minimiser(theta))
    (x.sin() @ B).backward()
    explicit = theta.detach().requires_grad_()
    (torch.linalg.solve(A, C @ explicit).sin() @ B).backward()
    torch.testing.assert_close(theta.grad, explicit.grad, rtol=1e-12, atol=1e-13)


def test_the_ridge_is_the_solvers() -> None:
    theta = normal(3).requires_grad_()
    (lower_solution(quadratic, theta, minimiser(theta), solver=dense(4, ridge=0.7)) @ B).backward()
    expected = C.T @ torch.linalg.solve(A + 0.7 * torch.eye(4, dtype=F64), B)
    torch.testing.assert_close(theta.grad, expected, rtol=1e-12, atol=1e-13)


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

    solver = dense(20, ridge=0.5)
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


def test_gradcheck_on_a_loss_that_is_not_quadratic() -> None:
    assert torch.autograd.gradcheck(solved, normal(3, seed=4).requires_grad_())


def test_several_uses_and_other_parameters_of_the_graph() -> None:
    theta = normal(3, seed=4)
    w = normal(3, seed=5)

    def value(parts: Tree, state: Callable[[Tensor], Tensor]) -> Tensor:
        x = state(parts["theta"])
        return (
            (x * parts["w"]).sum() * parts["theta"].prod()
            + x.pow(3).sum()
            + (parts["w"] ** 2).sum()
        )

    leaves = {"theta": theta.clone().requires_grad_(), "w": w.clone().requires_grad_()}
    value(leaves, solved).backward()
    numeric = finite_differences(
        lambda parts: value(
            parts, lambda at: newton(lambda x: quartic(at, x), torch.zeros(3, dtype=F64))
        ).detach(),
        {"theta": theta, "w": w},
    )
    assert_same({name: leaf.grad for name, leaf in leaves.items()}, numeric, rtol=1e-7, atol=1e-8)


def test_theta_shared_by_two_lower_levels_adds_up() -> None:
    theta = normal(3, seed=4).requires_grad_()
    one = lower_solution(quadratic, theta, minimiser(theta), solver=dense(4))
    two = solved(theta)
    ((one @ B) * two.sum()).backward()
    jacobian = torch.autograd.functional.jacobian(solved, theta.detach())
    expected = C.T @ torch.linalg.solve(A, B) * two.detach().sum() + (
        one.detach() @ B
    ) * jacobian.sum(0)
    torch.testing.assert_close(theta.grad, expected, rtol=1e-11, atol=1e-12)


def test_several_outputs_are_differentiated_one_by_one() -> None:
    """One leaf of x alone, then the other, through one graph: the two rows of the Jacobian."""
    a = spd(2, seed=6)
    b = spd(3, seed=7)
    k = normal(2, 3, seed=8)
    whole = torch.cat([torch.cat([a, 0.1 * k], 1), torch.cat([0.1 * k.T, b], 1)])

    def g(theta: Tensor, x: Tree) -> Tensor:
        flat = torch.cat([x["a"], x["b"]])
        return 0.5 * flat @ whole @ flat - flat @ theta

    theta = normal(5, seed=9).requires_grad_()
    best = torch.linalg.solve(whole, theta.detach())
    x = lower_solution(g, theta, {"a": best[:2], "b": best[2:]}, solver=dense(5))
    inverse = torch.linalg.inv(whole)
    (first,) = torch.autograd.grad(x["a"][0], theta, retain_graph=True)
    (second,) = torch.autograd.grad(x["b"][2], theta)
    torch.testing.assert_close(first, inverse[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(second, inverse[4], rtol=1e-11, atol=1e-12)


class Inner(nn.Module):
    """A layer whose output is the minimiser of a loss with learned parameters, fed by the layer
    below.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pull = nn.Parameter(torch.tensor(0.3, dtype=F64))

    @staticmethod
    def loss(theta: Tree, x: Tensor) -> Tensor:
        return (0.5 * (x - theta["target"]) ** 2 + 0.5 * theta["pull"].exp() * x**2).sum()

    def forward(self, target: Tensor) -> Tensor:
        best = (target / (1 + self.pull.exp())).detach()
        return lower_solution(
            self.loss, {"target": target, "pull": self.pull}, best, solver=dense(best.numel())
        )


def test_inside_a_module_between_two_layers() -> None:
    below = nn.Linear(3, 4).double()
    inner = Inner()
    above = nn.Linear(4, 1).double()
    model = nn.Sequential(below, inner, above)
    data = normal(3, seed=10)
    model(data).square().sum().backward()
    gradient = {name: leaf.grad for name, leaf in model.named_parameters()}
    explicit = above(below(data) / (1 + inner.pull.exp())).square().sum()
    expected = dict(
        zip(gradient, torch.autograd.grad(explicit, list(model.parameters())), strict=True)
    )
    assert_same(gradient, expected, rtol=1e-11, atol=1e-12)


def test_one_lower_level_in_another() -> None:
    """y*(x*(θ)): the second level's upper variable is the first one's solution, and θ itself."""

    def second(upper: Tree, y: Tensor) -> Tensor:
        return (0.5 * (y - upper["x"] * upper["theta"]) ** 2 + 0.25 * y**4).sum()

    def both(theta: Tensor) -> Tensor:
        x = solved(theta)
        upper = {"x": x, "theta": theta}
        y = newton(
            lambda at: second({name: leaf.detach() for name, leaf in upper.items()}, at),
            torch.zeros(3, dtype=F64),
        )
        return lower_solution(second, upper, y, solver=dense(3))

    assert torch.autograd.gradcheck(both, normal(3, seed=11).requires_grad_())


class TestWhatNeedsNoGradient:
    calls: int

    def solver(self, matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        self.calls += 1
        return torch.zeros_like(b)

    @pytest.fixture(autouse=True)
    def _count(self) -> None:
        self.calls = 0

    def test_without_a_graph_above_there_is_none(self) -> None:
        theta = normal(3)
        x = minimiser(normal(3))
        assert not lower_solution(quadratic, theta, x, solver=self.solver).requires_grad
        with torch.no_grad():
            assert not lower_solution(
                quadratic, theta.requires_grad_(), x, solver=self.solver
            ).requires_grad
        assert self.calls == 0

    def test_forward_solves_nothing_and_a_graph_in_x_is_cut(self) -> None:
        theta = normal(3).requires_grad_()
        start = minimiser(theta).requires_grad_()
        x = lower_solution(quadratic, theta, 1.0 * start, solver=self.solver)
        assert self.calls == 0
        assert torch.autograd.grad(x.sum(), start, allow_unused=True) == (None,)

    def test_constants_in_theta_may_be_whole_numbers(self) -> None:
        theta = {"a": normal(3).requires_grad_(), "rows": torch.tensor([2, 0])}

        def g(upper: Tree, x: Tensor) -> Tensor:
            return (0.5 * (x - upper["a"][upper["rows"]]) ** 2).sum()

        x = lower_solution(g, theta, theta["a"].detach()[[2, 0]], solver=dense(2))
        (x @ torch.tensor([1.0, 5.0], dtype=F64)).backward()
        assert_same(theta["a"].grad, torch.tensor([5.0, 0.0, 1.0], dtype=F64), rtol=1e-12)


def test_the_report_is_the_solution_of_every_solve() -> None:
    class Limited:
        name = "limited"

        def solve(self, matvec: Any, b: Tensor, x0: Tensor | None = None) -> Solution:
            system = LinearSystem.of(matvec, b)
            x, residual = system.start(x0)
            codes = system.codes(Outcome.ITERATION_LIMIT)
            return system.solution(
                x,
                system.norm(residual),
                codes,
                torch.zeros_like(codes),
                torch.full_like(system.size, 1.0),
            )

    reports: list[tuple[Solution, Tensor]] = []

    def note(solution: Solution, size: Tensor) -> None:
        reports.append((solution, size))

    theta = normal(3).requires_grad_()
    x = lower_solution(quadratic, theta, minimiser(theta), solver=Limited(), report=note)
    assert reports == []
    (x @ B).backward(retain_graph=True)
    assert [solution.outcome for solution, _ in reports] == [Outcome.ITERATION_LIMIT]
    assert reports[0][1] < 1e-12  # at the minimiser
    assert not theta.grad.any()  # v = 0, as reported
    warm = torch.linalg.solve(A, B)
    again = lower_solution(
        quadratic, theta, minimiser(theta), solver=Limited(), v0=warm, report=note
    )
    (again @ B).backward()
    torch.testing.assert_close(theta.grad, C.T @ warm, rtol=1e-12, atol=1e-13)
    assert len(reports) == 2
    off = minimiser(theta).detach() + 1
    (lower_solution(quadratic, theta, off, solver=Limited(), report=note) @ B).backward()
    # ∇_x g = A (x − x*)
    torch.testing.assert_close(reports[2][1], (A @ torch.ones_like(B)).norm(), rtol=1e-9, atol=0)


def test_x_is_not_copied_and_a_change_of_it_before_the_way_back_is_noticed() -> None:
    theta = normal(3).requires_grad_()
    best = minimiser(normal(3))
    before = best.clone()
    x = lower_solution(quadratic, theta, best, solver=dense(4))
    assert x.data_ptr() == best.data_ptr()
    assert not best.requires_grad
    loss = (x * B).sum()
    assert_same(best, before)
    best.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
