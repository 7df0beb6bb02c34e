"""Products with the lower Hessian and the cross derivative, against autograd and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, network_problem, normal
from torch import Tensor

from hgms_core import Linearization, Ravel, Tree, cross_product, curvature, stack

STRATEGIES = ("vjp", "jvp", "difference")


TOLERANCE = {"vjp": 1e-12, "jvp": 1e-12, "difference": 1e-7}


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


PROBLEM = network_problem()


THETA = PROBLEM.theta0


X = PROBLEM.x0


WHOLE = PROBLEM.lower_data.whole


SPEC = Ravel.of(X)


def lower(x: Tree) -> Tensor:
    return PROBLEM.g(THETA, x, WHOLE)


def dense_hessian(g: Callable[[Tree], Tensor], x: Tree) -> Tensor:
    spec = Ravel.of(x)
    return torch.autograd.functional.hessian(lambda flat: g(spec.unravel(flat)), spec.ravel(x))


def mixed(theta: Tree, x: Tree, v: Tree) -> Tree:
    """∇²_θx g v by two derivatives."""

    def along(theta: Tree) -> Tensor:
        slopes = torch.func.grad(PROBLEM.g, argnums=1)(theta, x, WHOLE)
        return sum((slopes[name] * v[name]).sum() for name in v)

    return torch.func.grad(along)(theta)


@every_strategy
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_products_are_those_of_the_dense_hessian_over_sixty_orders_of_magnitude(
    strategy: Any, scale: float
) -> None:
    at = curvature(lower, X, strategy)
    v = normal(SPEC.size)
    expected = scale * (dense_hessian(lower, X) @ v)
    within = TOLERANCE[strategy]
    torch.testing.assert_close(at.matvec(scale * v), expected, rtol=within, atol=scale * within)
    flat = SPEC.ravel(X).requires_grad_()
    (slope,) = torch.autograd.grad(lower(SPEC.unravel(flat)), flat)
    torch.testing.assert_close(at.gradient, slope, rtol=1e-13, atol=1e-14)


@every_strategy
def test_stacked_products_are_those_of_each_row(strategy: Any) -> None:
    states = [X, {name: leaf + 0.3 for name, leaf in X.items()}]
    at = curvature(lambda x: torch.func.vmap(lower)(x), stack(states), strategy, stacked=True)
    v = normal(2, SPEC.size)
    alone = [curvature(lower, state, "vjp") for state in states]
    expected = torch.stack([each.matvec(row) for each, row in zip(alone, v, strict=True)])
    torch.testing.assert_close(
        at.matvec(v), expected, rtol=TOLERANCE[strategy], atol=TOLERANCE[strategy]
    )
    gradients = torch.stack([each.gradient for each in alone])
    torch.testing.assert_close(at.gradient, gradients, rtol=1e-13, atol=1e-14)


@every_strategy
def test_leaves_that_are_linear_or_unused_contribute_nothing(strategy: Any) -> None:
    x = {"curved": normal(3), "linear": normal(2, seed=1), "unused": normal(2, seed=2)}
    at = curvature(lambda p: (p["curved"] ** 3).sum() + 2 * p["linear"].sum(), x, strategy)
    expected = torch.cat([6 * x["curved"], torch.zeros(4, dtype=F64)])
    torch.testing.assert_close(at.matvec(torch.ones(7, dtype=F64)), expected, rtol=1e-8, atol=1e-8)


@every_strategy
def test_the_cross_product_is_that_of_two_derivatives(strategy: Any) -> None:
    v = SPEC.unravel(normal(SPEC.size, seed=4))
    found = cross_product(lambda t, x: PROBLEM.g(t, x, WHOLE), THETA, X, v, strategy)
    assert_same(
        found, mixed(THETA, X, v), rtol=TOLERANCE[strategy], atol=1e-3 * TOLERANCE[strategy]
    )
    assert not any(leaf.requires_grad for leaf in found.values())


@pytest.mark.parametrize("displacement", [0.25, 2.0])
@pytest.mark.parametrize("size", [1.0, -40.0, 0.0])
def test_a_displacement_is_how_far_the_two_ends_lie_apart(displacement: float, size: float) -> None:
    """g = θx³: the central difference of ∇_θ g over τ to each side of x along a unit vector is
    3x² + τ²; v scales it.
    """
    theta = {"t": torch.ones((), dtype=F64)}
    x = {"x": torch.tensor(3.0, dtype=F64)}
    v = {"x": torch.tensor(size, dtype=F64)}
    found = cross_product(
        lambda t, p: t["t"] * p["x"] ** 3, theta, x, v, "difference", displacement
    )
    assert_same(found, {"t": torch.tensor(size * (27 + displacement**2), dtype=F64)}, rtol=1e-13)


def test_differences_of_a_loss_in_bfloat16_reach_as_far_as_its_rounding_asks() -> None:
    """g = Σ θ_i x_i⁴/12 with x rounded to bfloat16 on the way: H = diag(θ x²), ∇²_θx g v = x³
    v/3.
    """
    theta = {"t": torch.tensor([1.0, 2.0, 0.5])}
    x = {"x": torch.tensor([1.1, -2.3, 1.7])}
    v = torch.tensor([0.3, -0.5, 0.8])

    def g(t: Tree, p: Tree) -> Tensor:
        return (t["t"] * p["x"].bfloat16().float() ** 4).sum() / 12

    def error(found: Tensor, right: Tensor) -> float:
        return float((found - right).norm() / right.norm())

    def errors(precision: torch.dtype | None) -> tuple[float, float, float]:
        right = x["x"] ** 3 * v / 3
        product = curvature(lambda p: g(theta, p), x, "difference", precision=precision).matvec(v)
        mixed = cross_product(g, theta, x, {"x": v}, "difference", precision=precision)["t"]
        asked: list[Tensor] = []
        levels = Linearization.of(
            lambda t, p: (v * p["x"]).sum(), g, theta, x, "difference", precision
        )
        found = levels.hypergradient(lambda matvec, b: asked.append(matvec(b)) or b)
        assert_same(asked[0], product)
        hessian = theta["t"] * x["x"] ** 2
        return error(product, hessian * v), error(mixed, right), error(-found.value["t"], right)

    assert max(errors(torch.bfloat16)) < 0.05
    assert min(errors(None)) > 0.1
    assert errors(torch.float32) == errors(None)  # no coarser than x
