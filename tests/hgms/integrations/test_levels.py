"""Lower solutions inside the losses of other levels: chains and trees, against closed forms and
differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, finite_differences, normal, rejects, spd
from support.solver_systems import dense, newton
from torch import Tensor

from hgms.adapters import hypergradient
from hgms.integrations import lower_solution
from hgms_core import CallableSolver, ConfigError, Tree


class Linear:
    """½zᵀAz − zᵀ(By + Cθ), a lower level whose minimiser z = A⁻¹(By + Cθ) torch can
    differentiate as it is written.
    """

    def __init__(self, size: int, above: int, upper: int, seed: int) -> None:
        self.a, self.b, self.c = (
            spd(size, seed=seed),
            normal(size, above, seed=seed + 1),
            normal(size, upper, seed=seed + 2),
        )

    def loss(self, upper: Tree, z: Tensor) -> Tensor:
        return 0.5 * z @ self.a @ z - z @ (self.b @ upper["y"] + self.c @ upper["theta"])

    def exact(self, upper: Tree) -> Tensor:
        return torch.linalg.solve(self.a, self.b @ upper["y"] + self.c @ upper["theta"])


class Middle:
    """½yᵀDy − yᵀEθ + ½‖z*(θ, y) − Mθ‖²: a level with another below it; its minimiser is linear
    in θ.
    """

    def __init__(self, below: Linear, seed: int) -> None:
        size, (lowest, upper) = below.b.shape[1], below.c.shape
        self.below, self.d, self.e = below, spd(size, seed=seed), normal(size, upper, seed=seed + 1)
        self.m = normal(lowest, upper, seed=seed + 2)

    def under(self, theta: Tensor, y: Tensor, **how: Any) -> Tensor:
        upper = {"theta": theta, "y": y}
        return lower_solution(self.below.loss, upper, self.below.exact, solver=dense, **how)

    def loss(self, theta: Tensor, y: Tensor, **how: Any) -> Tensor:
        z = self.under(theta, y, **how)
        return 0.5 * y @ self.d @ y - y @ self.e @ theta + 0.5 * (z - self.m @ theta).square().sum()

    def exact(self, theta: Tensor) -> Tensor:
        inverse = torch.linalg.inv(self.below.a)
        of_y = inverse @ self.below.b
        of_theta = inverse @ self.below.c
        return torch.linalg.solve(
            self.d + of_y.T @ of_y, self.e @ theta - of_y.T @ (of_theta - self.m) @ theta
        )

    def both(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        y = self.exact(theta)
        return y, self.below.exact({"theta": theta, "y": y})


CHAIN = Middle(Linear(4, above=3, upper=2, seed=1), seed=5)
THETA = normal(2, seed=20)


def slope(value: Callable[[Tensor], Tensor]) -> Tensor:
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(value(theta), theta)[0]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("outer", "inner"), [("vjp", "vjp"), ("jvp", "jvp"), ("difference", "vjp")]
)
def test_three_levels_against_the_closed_form(outer: Any, inner: Any) -> None:
    """The upper loss looks at both levels below it."""

    def upper(theta: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (y - 1).pow(4).sum() + z.sin().sum() + theta.square().sum()

    def f(theta: Tensor, y: Tensor) -> Tensor:
        return upper(theta, y, CHAIN.under(theta, y))

    def g(theta: Tensor, y: Tensor) -> Tensor:
        return CHAIN.loss(theta, y, strategy=inner)

    rtol = 1e-6 if outer == "difference" else 1e-10
    expected = slope(lambda theta: upper(theta, *CHAIN.both(theta)))
    how = {"solver": dense, "strategy": outer}
    estimate = hypergradient(f, g, THETA, CHAIN.exact(THETA), **how)
    torch.testing.assert_close(estimate.value, expected, rtol=rtol, atol=rtol)
    if outer != "difference":
        in_a_graph = slope(lambda theta: f(theta, lower_solution(g, theta, CHAIN.exact, **how)))
        torch.testing.assert_close(in_a_graph, expected, rtol=rtol, atol=rtol)


def cup(away: Tensor, above: Tensor) -> Tensor:
    """Least where ``away`` is 0, of no finite order in it, with a curvature that depends on what
    is above.
    """
    return ((1 + above**2) * (away.exp() - away)).sum()


def bent(upper: Tree, z: Tensor) -> Tensor:
    """Neither quadratic in z nor linear in what is above it, and yet with a minimiser that can
    be written down.
    """
    return cup(z - lowest(upper), upper["theta"])


def lowest(upper: Tree) -> Tensor:
    return (upper["y"] + upper["theta"]).sin()


def between(theta: Tensor, y: Tensor, below: Callable[[Tree], Tensor] | None = None) -> Tensor:
    upper = {"theta": theta, "y": y}
    z = lower_solution(bent, upper, lowest, solver=dense) if below is None else below(upper)
    return 0.5 * (y - theta**2).square().sum() + 0.3 * (z * y).square().sum() + 0.1 * z.exp().sum()


def implicit(theta: Tensor) -> Tensor:
    """y*(θ), by Newton's steps through which nobody differentiates."""
    return newton(lambda y: between(theta, y, lowest), theta**2)


def test_levels_that_are_not_quadratic_against_differences() -> None:
    theta = normal(2, seed=21)

    def value(theta: Tensor) -> Tensor:
        y = lower_solution(between, theta, implicit, solver=dense)
        return (y - 1).pow(3).sum() + lower_solution(
            bent, {"theta": theta, "y": y}, lowest, solver=dense
        ).sum()

    leaf = theta.clone().requires_grad_()
    gradient = torch.autograd.grad(value(leaf), leaf)[0]
    expected = finite_differences(lambda tree: value(tree["t"]).detach(), {"t": theta})["t"]
    assert_same(gradient, expected, rtol=1e-7, atol=1e-8)


def test_the_derivative_of_a_lower_solution_has_derivatives_of_every_order() -> None:
    y = normal(2, seed=22)

    def solved(theta: Tensor) -> Tensor:
        return lower_solution(bent, {"theta": theta, "y": y}, lowest, solver=dense)

    theta = normal(2, seed=23)
    assert torch.autograd.gradcheck(solved, theta.clone().requires_grad_())
    assert torch.autograd.gradgradcheck(solved, theta.clone().requires_grad_())
    rows = torch.autograd.functional.jacobian(solved, theta)
    v = normal(2, seed=24)
    torch.testing.assert_close(torch.func.jvp(solved, (theta,), (v,))[1], rows @ v)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(solved)(theta), rows)


def test_stacked_candidates_have_lower_levels_of_their_own() -> None:
    ys = normal(3, 2, seed=25).requires_grad_()
    theta = normal(2, seed=26)
    stacked = torch.func.vmap(between, in_dims=(None, 0))(theta, ys)
    looped = torch.stack([between(theta, y) for y in ys])
    torch.testing.assert_close(stacked, looped)
    slopes = [torch.autograd.grad(values.sum(), ys)[0] for values in (stacked, looped)]
    torch.testing.assert_close(*slopes)


def test_what_it_costs() -> None:
    """Solves of the lowest level: 1 for the middle gradient, 2 for every product with its
    Hessian, 1 for the mixed one.
    """
    solves: list[Any] = []
    how = {"solver": CallableSolver(lambda matvec, b: b)}

    def middle(theta: Tensor, y: Tensor) -> Tensor:
        z = lower_solution(
            lambda y, z: 0.5 * (z - y).square().sum(),
            y,
            lambda y: y,
            report=lambda *of: solves.append(of),
            **how,
        )
        return 0.5 * (z - theta).square().sum()

    theta = torch.ones(2, dtype=F64)
    estimate = hypergradient(lambda theta, y: y.sum(), middle, theta, theta, **how)
    assert estimate.solution is not None
    assert len(solves) == 1 + 2 * estimate.solution.products + 1
    torch.testing.assert_close(estimate.value, torch.ones(2, dtype=F64))


def test_a_tensor_that_is_not_in_theta_is_named() -> None:
    def middle(theta: Tensor, y: Tensor) -> Tensor:
        loss = lambda theta, z: bent({"theta": theta, "y": y}, z)  # noqa: E731
        return (lower_solution(loss, theta, THETA, solver=dense) * y).sum()

    with rejects("hidden-tensor", "g", of=ConfigError) as caught:
        hypergradient(lambda theta, y: y.sum(), middle, THETA, THETA, solver=dense)
    assert "y.detach()" in str(caught.value.hint)


def test_candidates_that_are_joined_with_a_constant_are_named() -> None:
    """Inside of the loss, where torch reported an internal assertion."""

    def solution(theta: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return lower_solution(
            lambda theta, x: (theta * x * x / 2 - torch.cat([first, last]) * x).sum(),
            theta,
            lambda theta: torch.cat([first, last]) / theta,
            solver=dense,
        )

    with rejects("hidden-tensor", "g"):
        torch.func.vmap(solution, in_dims=(None, 0, None))(
            torch.ones(3), torch.ones(4, 2), torch.ones(1)
        )


def test_a_batch_of_each_candidate_is_handed_over() -> None:
    rows = normal(3, 2, seed=27)
    ys = normal(3, 2, seed=28).requires_grad_()

    def in_theta(y: Tensor, row: Tensor) -> Tensor:
        return lower_solution(
            lambda t, z: 0.5 * (z - t["y"] * t["row"]).square().sum(),
            {"y": y, "row": row},
            lambda t: t["y"] * t["row"],
            solver=dense,
        ).sum()

    assert_same(torch.autograd.grad(torch.func.vmap(in_theta)(ys, rows).sum(), ys)[0], rows)
