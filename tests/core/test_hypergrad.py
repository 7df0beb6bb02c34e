"""Hessian products, mixed derivatives and ``hypergradient`` against dense derivatives and closed
forms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from support.helpers import (
    F64,
    assert_same,
    finite_differences,
    network_problem,
    normal,
    rejects,
    spd,
)
from torch import Tensor

from hgms.integrations.lower_solution import lower_solution
from hgms.solvers import CG, MINRES
from hgms_core import (
    CallableSolver,
    ConfigError,
    Cost,
    Key,
    Outcome,
    Problem,
    Ravel,
    Tree,
    check_losses,
    cross_product,
    curvature,
    hypergradient,
    stack,
    twice_differentiable_attention,
    upper_gradients,
)
from hgms_core.hypergrad import implicit

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


@every_strategy
def test_products_are_those_of_the_dense_hessian(strategy: Any) -> None:
    at = curvature(lower, X, strategy)
    hessian = dense_hessian(lower, X)
    for seed in range(3):
        v = normal(SPEC.size, seed=seed)
        torch.testing.assert_close(
            at.matvec(v), hessian @ v, rtol=TOLERANCE[strategy], atol=TOLERANCE[strategy]
        )
    flat = SPEC.ravel(X).requires_grad_()
    (slope,) = torch.autograd.grad(lower(SPEC.unravel(flat)), flat)
    torch.testing.assert_close(at.gradient, slope, rtol=1e-13, atol=1e-14)


@every_strategy
def test_stacked_products_are_those_of_each_row(strategy: Any) -> None:
    states = [
        PROBLEM.x0,
        {name: leaf + 0.3 for name, leaf in X.items()},
        {name: -leaf for name, leaf in X.items()},
    ]
    stacked = stack(states)
    at = curvature(lambda x: torch.func.vmap(lower)(x), stacked, strategy, stacked=True)
    v = normal(3, SPEC.size)
    found = at.matvec(v)
    for i, state in enumerate(states):
        alone = curvature(lower, state, "vjp")
        torch.testing.assert_close(
            found[i], alone.matvec(v[i]), rtol=TOLERANCE[strategy], atol=TOLERANCE[strategy]
        )
        torch.testing.assert_close(at.gradient[i], alone.gradient, rtol=1e-13, atol=1e-14)


@every_strategy
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_products_are_linear_over_sixty_orders_of_magnitude(strategy: Any, scale: float) -> None:
    v = normal(SPEC.size)
    found = curvature(lower, X, strategy).matvec(scale * v)
    expected = scale * (dense_hessian(lower, X) @ v)
    torch.testing.assert_close(found, expected, rtol=0, atol=scale * 1e-6)


def test_a_zero_direction_is_safe_in_float32() -> None:
    x = {"x": torch.full((4,), 1e4)}
    at = curvature(lambda point: (point["x"] ** 2).sum(), x, "difference")
    assert_same(at.matvec(torch.zeros(4)), torch.zeros(4))


@every_strategy
def test_a_linear_lower_loss_has_a_zero_hessian(strategy: Any) -> None:
    slope = normal(3)
    at = curvature(lambda x: slope @ x["x"], {"x": normal(3, seed=1)}, strategy)
    torch.testing.assert_close(
        at.matvec(normal(3, seed=2)), torch.zeros(3, dtype=F64), rtol=0, atol=1e-9
    )
    assert_same(at.gradient, slope)


@every_strategy
def test_leaves_that_are_linear_or_unused_contribute_nothing(strategy: Any) -> None:
    x = {"curved": normal(3), "linear": normal(2, seed=1), "unused": normal(2, seed=2)}
    at = curvature(lambda p: (p["curved"] ** 3).sum() + 2 * p["linear"].sum(), x, strategy)
    expected = torch.cat([6 * x["curved"], torch.zeros(4, dtype=F64)])
    torch.testing.assert_close(at.matvec(torch.ones(7, dtype=F64)), expected, rtol=1e-8, atol=1e-8)


def double_backward(theta: Tree, x: Tree, v: Tree) -> Tree:
    upper = {name: leaf.clone().requires_grad_() for name, leaf in theta.items()}
    point = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    slopes = torch.autograd.grad(
        PROBLEM.g(upper, point, WHOLE), list(point.values()), create_graph=True
    )
    product = sum((slope * v[name]).sum() for slope, name in zip(slopes, point, strict=True))
    return dict(zip(upper, torch.autograd.grad(product, list(upper.values())), strict=True))


@every_strategy
def test_the_cross_product_is_double_backward(strategy: Any) -> None:
    v = SPEC.unravel(normal(SPEC.size, seed=4))
    found = cross_product(lambda t, x: PROBLEM.g(t, x, WHOLE), THETA, X, v, strategy)
    assert_same(
        found,
        double_backward(THETA, X, v),
        rtol=TOLERANCE[strategy],
        atol=1e-3 * TOLERANCE[strategy],
    )
    assert not any(leaf.requires_grad for leaf in found.values())


@every_strategy
def test_the_cross_product_is_zero_where_theta_or_the_mix_is_missing(strategy: Any) -> None:
    theta = {"t": normal(2)}
    x = {"x": normal(3)}
    v = {"x": normal(3, seed=1)}
    for g in (
        lambda t, p: (p["x"] ** 2).sum(),
        lambda t, p: (p["x"] ** 2).sum() + (t["t"] ** 2).sum(),
    ):
        torch.testing.assert_close(
            cross_product(g, theta, x, v, strategy)["t"],
            torch.zeros(2, dtype=F64),
            rtol=0,
            atol=1e-9,
        )


@pytest.mark.parametrize("displacement", [0.25, 2.0])
def test_a_displacement_is_how_far_the_two_ends_lie_apart(displacement: float) -> None:
    """g = θx³: the central difference of ∇_θ g over τ to each side of x along a unit vector is
    3x² + τ²; v scales it.
    """
    theta = {"t": torch.ones((), dtype=F64)}
    x = {"x": torch.tensor(3.0, dtype=F64)}
    for size in (1.0, -40.0):
        v = {"x": torch.tensor(size, dtype=F64)}
        found = cross_product(
            lambda t, p: t["t"] * p["x"] ** 3, theta, x, v, "difference", displacement
        )
        assert_same(
            found, {"t": torch.tensor(size * (27 + displacement**2), dtype=F64)}, rtol=1e-13
        )
    nothing = cross_product(
        lambda t, p: t["t"] * p["x"], theta, x, {"x": 0 * x["x"]}, "difference", displacement
    )
    assert_same(nothing, {"t": torch.zeros((), dtype=F64)})


def test_differences_of_a_loss_in_bfloat16_reach_as_far_as_its_rounding_asks() -> None:
    """g = Σ θ_i x_i⁴/12 with x rounded to bfloat16 on the way: H = diag(θ x²), ∇²_θx g v = x³
    v/3.
    """
    theta = {"t": torch.tensor([1.0, 2.0, 0.5])}
    x = {"x": torch.tensor([1.1, -2.3, 1.7])}
    v = torch.tensor([0.3, -0.5, 0.8])

    def g(t: Tree, p: Tree) -> Tensor:
        return (t["t"] * p["x"].bfloat16().float() ** 4).sum() / 12

    def errors(precision: torch.dtype | None) -> tuple[float, float, float]:
        hessian = theta["t"] * x["x"] ** 2
        right = x["x"] ** 3 * v / 3
        product = curvature(lambda p: g(theta, p), x, "difference", precision=precision).matvec(v)
        mixed = cross_product(g, theta, x, {"x": v}, "difference", precision=precision)["t"]
        asked: list[Tensor] = []
        found = implicit(
            lambda t, p: (v * p["x"]).sum(),
            g,
            theta,
            x,
            lambda matvec, b: asked.append(matvec(b)) or b,
            "difference",
            precision=precision,
        )
        assert_same(asked[0], product)
        whole = float((found.value["t"] + right).norm() / right.norm())
        return (
            float((product - hessian * v).norm() / (hessian * v).norm()),
            float((mixed - right).norm() / right.norm()),
            whole,
        )

    assert max(errors(torch.bfloat16)) < 0.05
    assert min(errors(None)) > 0.1
    assert errors(torch.float32) == errors(None)  # no coarser than x


def test_attention_has_a_second_derivative_inside_the_context_alone() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaf = normal(1, 1, 6, 4).requires_grad_()

    def product() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
        (slope,) = torch.autograd.grad(out.pow(2).sum(), leaf, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), leaf)[0]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="derivative"):
        product()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), twice_differentiable_attention():
        found = product()
    scores = (leaf @ leaf.transpose(-1, -2) / 2).masked_fill(
        ~torch.ones(6, 6).tril().bool(), -torch.inf
    )
    (slope,) = torch.autograd.grad(
        (scores.softmax(-1) @ leaf).pow(2).sum(), leaf, create_graph=True
    )
    torch.testing.assert_close(
        found, torch.autograd.grad(slope.pow(2).sum(), leaf)[0], rtol=1e-9, atol=1e-9
    )


def test_upper_gradients_are_zero_for_what_does_not_enter() -> None:
    theta = {"t": normal(2)}
    x = {"x": normal(3)}
    value, direct, slope = upper_gradients(lambda t, p: (p["x"] ** 2).sum(), theta, x)
    assert_same(direct, {"t": torch.zeros(2, dtype=F64)})
    assert_same(slope, {"x": 2 * x["x"]})
    assert not value.requires_grad
    _, direct, slope = upper_gradients(lambda t, p: torch.tensor(1.0, dtype=F64), theta, x)
    assert_same([direct["t"].sum(), slope["x"].sum()], [0.0, 0.0])


# --- hypergradient(): f = ½‖x − c‖² + ½ aθᵀθ, g = ½ xᵀAx − xᵀBθ, so x* = A⁻¹Bθ and ∇F = aθ +
# BᵀA⁻¹(x* − c)

A = spd(5)
B = normal(5, 3, seed=1)
C = normal(5, seed=2)


def quadratic_lower(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * x @ A @ x - x @ B @ theta


def quadratic_upper(theta: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (x - C).square().sum() + 0.05 * theta.square().sum()


def exact(theta: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.linalg.solve(A, B @ theta)
    return x, 0.1 * theta + B.T @ torch.linalg.solve(A, x - C)


def dense(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """Columns of the operator, then a dense solve."""
    return torch.linalg.solve(
        torch.stack([matvec(e) for e in torch.eye(len(b), dtype=b.dtype)], dim=1), b
    )


def scipy_cg(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    operator = scipy.sparse.linalg.LinearOperator(
        (len(b), len(b)),
        matvec=lambda v: matvec(torch.from_numpy(np.ascontiguousarray(v))).numpy(),
        dtype=np.float64,
    )
    value, _ = scipy.sparse.linalg.cg(operator, b.numpy(), rtol=1e-12)
    return torch.from_numpy(value)


def fixed_point(matvec: Callable[[Tensor], Tensor], b: Tensor, **_options: Any) -> Tensor:
    """The calling convention of JAXopt and TorchOpt: solve(matvec, b, **options)."""
    v = torch.zeros_like(b)
    for _ in range(300):
        v = v + 0.2 * (b - matvec(v))
    return v


@every_strategy
@pytest.mark.parametrize("solver", [dense, scipy_cg, fixed_point])
def test_the_hypergradient_is_the_closed_form_with_any_callable(strategy: Any, solver: Any) -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        quadratic_upper, quadratic_lower, theta, x, solver=solver, strategy=strategy
    )
    assert_same(found.value, expected, rtol=1e-6 if strategy == "difference" else 1e-10)
    assert found.outcome is Outcome.CONVERGED
    assert found.residual is not None
    assert found.residual < 1e-6
    assert found.lower_gradient_norm is not None
    assert found.lower_gradient_norm < 1e-12
    assert_same(found.upper_loss, quadratic_upper(theta, x), rtol=1e-15)


def test_dictionaries_come_back_as_they_were_given() -> None:
    theta = normal(3, seed=3)
    names = ("first", "second")
    x, expected = exact(theta)
    upper = {"first": theta[:1], "second": theta[1:]}

    def join(t: Tree) -> Tensor:
        return torch.cat([t[name] for name in names])

    found = hypergradient(
        lambda t, p: quadratic_upper(join(t), p["p"]),
        lambda t, p: quadratic_lower(join(t), p["p"]),
        upper,
        {"p": x},
        solver=dense,
    )
    assert_same(join(found.value), expected, rtol=1e-12)
    assert tuple(found.value) == names


def test_only_one_of_the_two_may_be_a_dictionary() -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        lambda t, p: quadratic_upper(t["t"], p),
        lambda t, p: quadratic_lower(t["t"], p),
        {"t": theta},
        x,
        solver=dense,
    )
    assert_same(found.value, {"t": expected}, rtol=1e-12)


def test_the_hypergradient_is_the_slope_of_the_value() -> None:
    # An independent route on a nonlinear problem: solve the lower level by Newton's method at θ ± ε
    # and difference F.
    def g(theta: Tensor, x: Tensor) -> Tensor:
        return 0.5 * x @ A @ x + (x**4).sum() / 4 - x @ B @ torch.sin(theta)

    def solve(theta: Tensor) -> Tensor:
        x = torch.zeros(5, dtype=F64)
        for _ in range(60):
            slope = A @ x + x**3 - B @ torch.sin(theta)
            x = x - torch.linalg.solve(A + torch.diag(3 * x**2), slope)
        return x

    theta = normal(3, seed=5)
    slopes = finite_differences(lambda t: quadratic_upper(t["t"], solve(t["t"])), {"t": theta})
    found = hypergradient(quadratic_upper, g, theta, solve(theta), solver=dense)
    assert_same(found.value, slopes["t"], rtol=1e-7, atol=1e-9)


def test_an_upper_loss_without_x_leaves_the_direct_term() -> None:
    theta = normal(3)
    found = hypergradient(
        lambda t, x: (t**2).sum(), quadratic_lower, theta, normal(5), solver=dense
    )
    assert_same(found.value, 2 * theta)


def test_an_upper_loss_without_theta_leaves_the_implicit_term() -> None:
    theta = normal(3, seed=3)
    x, expected = exact(theta)
    found = hypergradient(
        lambda t, p: 0.5 * (p - C).square().sum(), quadratic_lower, theta, x, solver=dense
    )
    assert_same(found.value, expected - 0.1 * theta, rtol=1e-12)


def test_a_lower_loss_without_theta_leaves_the_direct_term() -> None:
    theta = normal(3)
    found = hypergradient(
        quadratic_upper, lambda t, x: 0.5 * x @ A @ x, theta, normal(5), solver=dense
    )
    assert_same(found.value, 0.1 * theta)


def test_a_linear_lower_loss_is_a_zero_system() -> None:
    theta = normal(3)
    found = hypergradient(
        quadratic_upper, lambda t, x: x @ B @ t, theta, normal(5), solver=lambda matvec, b: b
    )
    assert found.residual == 1.0
    assert found.outcome is Outcome.ITERATION_LIMIT


def test_the_arguments_are_not_changed() -> None:
    theta = normal(3).requires_grad_()
    x = normal(5)
    before = theta.detach().clone(), x.clone()
    hypergradient(quadratic_upper, quadratic_lower, theta, x, solver=dense)
    assert_same([theta.detach(), x], list(before))
    assert theta.requires_grad
    assert theta.grad is None
    assert not x.requires_grad


def test_the_cost_is_what_was_called() -> None:
    theta = normal(3)
    found = implicit(
        lambda t, x: quadratic_upper(t["t"], x["x"]),
        lambda t, x: quadratic_lower(t["t"], x["x"]),
        {"t": theta},
        {"x": normal(5)},
        dense,
        rows=(7, 11),
    )
    # five columns and one product to check the answer
    expected = Cost(
        upper_gradients=1, lower_gradients=1, products=6, cross_products=1, rows=7 + 11 * 8
    )
    assert found.cost == expected


def test_an_unknown_strategy_names_the_nearest() -> None:
    theta = {"t": normal(3)}
    x = {"x": normal(5)}

    def g(t: Tree, p: Tree) -> Tensor:
        return quadratic_lower(t["t"], p["x"])

    strategy: Any = "vpj"
    calls: list[Callable[[], object]] = [
        lambda: curvature(lambda p: g(theta, p), x, strategy),
        lambda: cross_product(g, theta, x, x, strategy),
        lambda: hypergradient(g, g, theta, x, solver=dense, strategy=strategy),
        lambda: lower_solution(g, theta, x, solver=dense, strategy=strategy),
    ]
    for call in calls:
        with rejects("unknown-choice", "strategy", of=ConfigError) as caught:
            call()
        assert caught.value.did_you_mean == ("vjp",)
        assert caught.value.hint == "available: difference, jvp, vjp"


@pytest.mark.parametrize("broken", ["mixed", "direct", "slope"])
def test_a_hypergradient_that_is_not_finite_says_so_whatever_the_solve_did(broken: str) -> None:
    """Where the linear system is sound: √ has no derivative at 0."""
    zero = torch.zeros(2, dtype=F64)
    x = torch.tensor([1.0, 0.0], dtype=F64)

    def g(t: Tensor, p: Tensor) -> Tensor:
        term = {
            "mixed": (p[0] * t.sqrt()).sum(),
            "slope": p[0] * t.sum() + (p[0] - 1).abs().sqrt(),
            "direct": p[0] * t.sum(),
        }
        return 0.5 * p.square().sum() + term[broken]

    def f(t: Tensor, p: Tensor) -> Tensor:
        return p[0] + (t.sqrt().sum() if broken == "direct" else 0.0)

    strategy: Any = "difference" if broken == "slope" else "vjp"  # which looks beside the kink
    found = hypergradient(
        f, g, zero, x, solver=CallableSolver(lambda matvec, b: b), strategy=strategy
    )
    assert found.outcome is Outcome.NONFINITE
    assert not (
        torch.isfinite(found.value).all()
        and torch.isfinite(found.lower_gradient_norm or torch.tensor(0.0))
    )


def test_a_callable_that_returns_nan_is_reported_and_not_passed_on() -> None:
    theta = normal(3)
    found = hypergradient(
        quadratic_upper, quadratic_lower, theta, normal(5), solver=lambda matvec, b: b * torch.nan
    )
    assert found.outcome is Outcome.NONFINITE
    assert torch.isfinite(found.value).all()


def test_a_callable_that_stops_early_is_told_apart() -> None:
    solver = CallableSolver(lambda matvec, b: 0.9 * b, rtol=0.05)
    assert solver.solve(lambda v: v, torch.ones(3)).outcome is Outcome.ITERATION_LIMIT
    assert (
        CallableSolver(lambda matvec, b: 0.9 * b, rtol=0.2)
        .solve(lambda v: v, torch.ones(3))
        .outcome
        is Outcome.CONVERGED
    )
    assert solver.solve(lambda v: v, torch.zeros(3)).residual == 0


def test_a_callable_may_solve_a_batch() -> None:
    scale = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)
    solution = CallableSolver(lambda matvec, b: b / scale).solve(lambda v: scale * v, normal(3, 4))
    assert bool(solution.converged.all())
    assert solution.codes.shape == (3,)


@every_strategy
def test_attention_can_be_differentiated_twice(strategy: Any) -> None:
    q = normal(1, 2, 4, 8)

    def fused(x: Tree) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q * x["w"], q, q).square().sum()

    def written_out(w: Tensor) -> Tensor:
        return (torch.softmax(w * q @ q.mT / 8**0.5, dim=-1) @ q).square().sum()

    w = torch.tensor(0.7, dtype=F64)
    expected = torch.autograd.functional.hessian(written_out, w)
    assert_same(
        curvature(fused, {"w": w}, strategy).matvec(torch.ones(1, dtype=F64)),
        expected.reshape(1),
        rtol=1e-6,
    )


# --- faults of 0.8.0


def ones(_: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (x - 1).square().sum()


def apart(theta: Tensor, x: Tensor) -> Tensor:
    """x*(θ) = θ, so ∇F = θ − 1 with :func:`ones`."""
    return 0.5 * (x - theta).square().sum()


@pytest.mark.nightly
@every_strategy
def test_a_compiled_loss_has_its_second_derivative(strategy: Any) -> None:
    """The gradient of compiled code has no graph: H was taken for 0, and h was 100."""
    theta = torch.ones(3, dtype=F64)
    bent = lambda theta, x: apart(theta, x) + 0.1 * torch.tanh(x - theta).square().sum()  # noqa: E731
    for loss in (apart, bent):
        compiled = torch.compile(loss, backend="aot_eager")
        have, want = (
            hypergradient(ones, g, theta, 2 * theta, solver=CG(ridge=1e-2), strategy=strategy).value
            for g in (compiled, loss)
        )
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-9)
    assert float(have[0]) == pytest.approx(0.99, abs=0.01)


NOISE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(50),
    "numpy": lambda: torch.from_numpy(np.random.rand(50)),  # noqa: NPY002
    "random": random.random,
}


@pytest.mark.parametrize("noise", NOISE)
def test_a_random_loss_is_rejected_where_its_value_is_zero(noise: str) -> None:
    """At x = θ the value and the gradient of g are 0, whatever is drawn; its Hessian is not."""
    theta = torch.full((50,), 3.0, dtype=F64)

    def g(theta: Tensor, x: Tensor) -> Tensor:
        return 0.5 * ((x - theta).square() * (1 + NOISE[noise]())).sum()

    with rejects("random-loss", "loss"):
        hypergradient(ones, g, theta, theta.clone(), solver=CG())


@every_strategy
def test_odd_tensors_have_the_right_hypergradient_or_an_error(strategy: Any) -> None:
    how: dict[str, Any] = {"solver": CG(), "strategy": strategy}
    theta = torch.ones(3, dtype=F64)
    expanded = torch.full((1,), 2.0, dtype=F64).expand(3)
    value = hypergradient(ones, apart, theta, expanded, **how).value
    torch.testing.assert_close(value, torch.ones(3, dtype=F64), rtol=1e-6, atol=1e-6)
    with rejects("wrong-shape", "x"):
        hypergradient(ones, apart, torch.ones(1), torch.zeros(0), **how)
    with torch.inference_mode():
        inside = torch.ones(3)
        with rejects("inference-mode"):
            hypergradient(ones, apart, theta, theta.clone(), **how)
    with rejects("inference-mode", "theta", "theta"):
        hypergradient(ones, apart, inside, torch.ones(3), **how)
    with rejects("inference-mode", "loss"):
        hypergradient(
            ones, lambda t, x: (inside @ x - t).square().sum(), theta, torch.ones(3), **how
        )


@every_strategy
@pytest.mark.parametrize(
    "g",
    [
        lambda theta, x: torch.tensor(0.0),
        lambda theta, x: (theta * theta).sum(),
        lambda theta, x: (x.detach() - theta).square().sum(),
        lambda theta, x: (torch.ones(3, requires_grad=True) - theta).square().sum(),
    ],
    ids=["constant", "of θ", "detached", "of another tensor"],
)
def test_a_lower_loss_without_a_gradient_in_x_is_named(g: Any, strategy: Any) -> None:
    with rejects("no-gradient", "g"):
        hypergradient(
            lambda theta, x: x.sum(),
            g,
            torch.ones(3),
            torch.ones(3),
            solver=CG(),
            strategy=strategy,
        )
    if g(torch.ones(3), torch.ones(3)).requires_grad:
        return  # lower_solution names the other tensor
    with rejects("no-gradient", "g"):
        theta = torch.ones(3, requires_grad=True)
        x = lower_solution(g, theta, torch.ones(3), solver=CG(), strategy=strategy)
        x.sum().backward()


class Square(torch.autograd.Function):
    """x² without a forward-mode derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        factor: Tensor = 2 * ctx.saved_tensors[0]
        return factor * slope


class OldSquare(torch.autograd.Function):
    """x² in the older form, which torch.func rejects."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    backward = Square.backward


@pytest.mark.parametrize("function", [Square, OldSquare])
@every_strategy
def test_backward_passes_alone_suffice(function: Any, strategy: Any) -> None:
    theta = torch.full((3,), 3.0, dtype=F64)

    def g(theta: Tensor, x: Tensor) -> Tensor:
        value: Tensor = 0.5 * function.apply(x - theta).sum()
        return value

    value = hypergradient(ones, g, theta, theta.clone(), solver=CG(), strategy=strategy).value
    torch.testing.assert_close(value, theta - 1, rtol=1e-6, atol=1e-6)
    leaf = theta.clone().requires_grad_()
    x = lower_solution(g, leaf, torch.clone, solver=CG(), strategy=strategy)
    ones(leaf, x).backward()
    torch.testing.assert_close(leaf.grad, theta - 1, rtol=1e-6, atol=1e-6)


@every_strategy
@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "use_mm_for_euclid_dist_if_necessary"])
def test_distances_have_their_second_derivative_or_an_error(mode: str, strategy: Any) -> None:
    z = normal(12, 4, seed=1)
    x = normal(12, seed=2)
    theta = torch.tensor(0.3, dtype=F64)

    def with_cdist(theta: Tensor, x: Tensor) -> Tensor:
        distance = torch.cdist(x.view(3, 4), z, compute_mode=mode)
        return theta.exp() * distance.square().mean() + 5 * (x**2).sum()

    def written_out(theta: Tensor, x: Tensor) -> Tensor:
        squares = (x.view(3, 1, 4) - z).square().sum(-1)
        return theta.exp() * squares.mean() + 5 * (x**2).sum()

    if mode.endswith("necessary") and strategy != "difference":
        with rejects("no-second-derivative", "hypergradient", "strategy"):
            hypergradient(ones, with_cdist, theta, x, solver=CG(), strategy=strategy)
        return
    have = hypergradient(ones, with_cdist, theta, x, solver=CG(), strategy=strategy).value
    want = hypergradient(ones, written_out, theta, x, solver=CG()).value
    torch.testing.assert_close(have, want, rtol=1e-8, atol=0)


def test_mse_loss_has_a_jvp() -> None:
    """Its derivative along x is a tensor of zeros without memory (pytorch issue 123996)."""
    a, y = normal(30, 3, seed=1), normal(30, seed=2)
    mse = torch.nn.functional.mse_loss
    values = [
        hypergradient(
            lambda t, x: mse(a @ x, y),
            lambda t, x: t.exp() * mse(a @ x, y) + (x**2).sum(),
            torch.zeros((), dtype=F64),
            torch.zeros(3, dtype=F64),
            solver=CG(),
            strategy=strategy,
        ).value
        for strategy in ("vjp", "jvp")
    ]
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


@every_strategy
def test_a_loss_that_changes_x_or_has_sparse_gradients_is_rejected(strategy: Any) -> None:
    rows = torch.arange(5)
    for option, code in (
        ({"max_norm": 1.0}, "loss-with-state"),
        ({"sparse": True}, "sparse-gradient"),
    ):
        table = torch.nn.Embedding(5, 2, **option)  # type: ignore[arg-type]
        x = {"weight": torch.full((5, 2), 2.0)}

        def g(theta: Tensor, x: Tree) -> Tensor:
            found: Tensor = torch.func.functional_call(table, x, (rows,))  # noqa: B023
            return 0.5 * (found - theta).square().sum()

        with rejects(code, "g"):
            hypergradient(
                lambda theta, x: x["weight"].sum(),
                g,
                torch.ones(2),
                x,
                solver=CG(),
                strategy=strategy,
            )


@pytest.mark.parametrize("solver", [CG(), MINRES()], ids=["cg", "minres"])
@every_strategy
def test_a_free_direction_keeps_the_derivative_of_the_solution(solver: Any, strategy: Any) -> None:
    """Softmax regression with an intercept: any constant may be added to it. By differences the
    rounding of the products was taken for curvature, and h was −4.84."""
    cross_entropy = torch.nn.functional.cross_entropy
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(10, 5, generator=generator, dtype=F64)
        y = torch.randint(0, 3, (10,), generator=generator)

        def g(decay: Tensor, x: Tensor) -> Tensor:
            fit = cross_entropy(rows @ x[:15].view(5, 3) + x[15:], y)  # noqa: B023
            return fit + decay / 2 * x[:15].square().sum()

        decay = torch.tensor(100.0, dtype=F64)
        x = torch.zeros(18, dtype=F64)
        for _ in range(20):
            slope = torch.func.grad(lambda x: g(decay, x))(x)  # noqa: B023
            x = x - torch.linalg.pinv(torch.func.hessian(lambda x: g(decay, x))(x)) @ slope  # noqa: B023
        f = lambda decay, x: x[15] + 0 * decay  # noqa: E731
        estimate = hypergradient(f, g, decay, x, solver=solver, strategy=strategy)
        assert estimate.outcome is Outcome.STAGNATED
        assert estimate.solution is not None
        assert float(estimate.solution.residual) <= 1
        assert float(estimate.solution.value.norm()) < 20
        assert abs(float(estimate.value)) < 1e-4
        if isinstance(solver, MINRES):
            assert float(estimate.solution.residual) == pytest.approx(3**-0.5, rel=1e-6)
            exact = hypergradient(f, g, decay, x, solver=solver)
            assert float(estimate.value) == pytest.approx(float(exact.value), rel=1e-3)


def test_a_run_rejects_hidden_random_numbers_where_the_loss_is_zero() -> None:
    """Neither the loss nor a global generator shows them at x = θ."""
    hidden = np.random.default_rng(0)
    theta = torch.full((50,), 3.0, dtype=F64)

    def g(theta: Tensor, x: Tensor, _: Tree) -> Tensor:
        noise = torch.from_numpy(hidden.random(50))
        return 0.5 * ((x - theta).square() * (1 + noise)).sum()

    made = Problem(theta0=theta, x0=theta.clone(), f=lambda theta, x, _: ones(theta, x), g=g)
    with rejects("random-loss", "loss"):
        check_losses(made, made.theta0, made.x0, Key(0))
