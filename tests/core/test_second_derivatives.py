"""Losses without second or forward-mode derivatives have the right product or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import F64, normal, rejects
from torch import Tensor

from hgms.adapters import check_losses, from_losses, hypergradient
from hgms.solvers import CG, MINRES
from hgms_core import Key, Outcome, Tree

STRATEGIES = ("vjp", "jvp", "difference")


every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def ones(_: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (x - 1).square().sum()


def apart(theta: Tensor, x: Tensor) -> Tensor:
    """x*(θ) = θ, so ∇F = θ − 1 with :func:`ones`."""
    return 0.5 * (x - theta).square().sum()


HIDDEN = np.random.default_rng(0)
NOISE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(50),
    "numpy": lambda: torch.from_numpy(np.random.rand(50)),  # noqa: NPY002
    "random": random.random,
    # no global generator shows it; a run looks away from its start
    "hidden": lambda: torch.from_numpy(HIDDEN.random(50)),
}


class OldSquare(torch.autograd.Function):
    """x² in the older form, which torch.func rejects."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * slope


class Square(OldSquare):
    """x² without a forward-mode derivative."""

    forward = staticmethod(lambda x: x**2)
    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class OnceSquare(Square):
    """x², as a fused kernel has it: torch takes its second derivative for zero."""

    backward = torch.autograd.function.once_differentiable(Square.backward)


@pytest.mark.nightly
@every_strategy
@pytest.mark.parametrize("bend", [0.0, 0.1])
def test_a_compiled_loss_has_its_second_derivative(bend: float, strategy: Any) -> None:
    """The gradient of compiled code has no graph: H was taken for 0, and h was 100."""
    theta = torch.ones(3, dtype=F64)
    loss = lambda theta, x: apart(theta, x) + bend * torch.tanh(x - theta).square().sum()  # noqa: E731
    have, want = (
        hypergradient(ones, g, theta, 2 * theta, solver=CG(ridge=1e-2), strategy=strategy).value
        for g in (torch.compile(loss, backend="aot_eager"), loss)
    )
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-9)
    assert float(have[0]) == pytest.approx(0.99, abs=0.01)


@pytest.mark.parametrize("noise", NOISE)
def test_a_random_loss_is_rejected_where_its_value_is_zero(noise: str) -> None:
    """At x = θ the value and the gradient of g are 0, whatever is drawn; its Hessian is not."""
    theta = torch.full((50,), 3.0, dtype=F64)

    def g(theta: Tensor, x: Tensor, *_: Tree) -> Tensor:
        return 0.5 * ((x - theta).square() * (1 + NOISE[noise]())).sum()

    with rejects("random-loss", "loss"):
        if noise != "hidden":
            hypergradient(ones, g, theta, theta.clone(), solver=CG())
        made = from_losses(theta0=theta, x0=theta.clone(), f=lambda t, x, _: ones(t, x), g=g)
        check_losses(made, made.theta0, made.x0, Key(0))


@every_strategy
def test_odd_tensors_have_the_right_hypergradient_or_an_error(strategy: Any) -> None:
    how: dict[str, Any] = {"solver": CG(), "strategy": strategy}
    theta = torch.ones(3, dtype=F64)
    expanded = torch.full((1,), 2.0, dtype=F64).expand(3)
    value = hypergradient(ones, apart, theta, expanded, **how).value
    torch.testing.assert_close(value, torch.ones(3, dtype=F64), rtol=1e-6, atol=1e-6)
    with rejects("wrong-shape", "x"):
        hypergradient(ones, apart, torch.ones(1), torch.zeros(0), **how)
    with torch.inference_mode(), rejects("inference-mode"):
        inside = torch.ones(3)
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
    f = lambda theta, x: x.sum()  # noqa: E731
    with rejects("no-gradient", "g"):
        hypergradient(f, g, torch.ones(3), torch.ones(3), solver=CG(), strategy=strategy)


@pytest.mark.parametrize("function", [Square, OldSquare, OnceSquare])
@every_strategy
def test_backward_passes_alone_suffice_unless_they_are_differentiable_once(
    function: Any, strategy: Any
) -> None:
    theta = torch.full((3,), 3.0, dtype=F64)

    def g(theta: Tensor, x: Tensor) -> Tensor:
        return 0.5 * function.apply(x - theta).sum()

    def value() -> Tensor:
        return hypergradient(ones, g, theta, theta.clone(), solver=CG(), strategy=strategy).value

    if function is OnceSquare and strategy != "difference":
        with rejects("no-second-derivative", "hypergradient", "strategy"):
            value()
        return
    torch.testing.assert_close(value(), theta - 1, rtol=1e-6, atol=1e-6)


@every_strategy
@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "use_mm_for_euclid_dist_if_necessary"])
def test_distances_have_their_second_derivative_or_an_error(mode: str, strategy: Any) -> None:
    z = normal(12, 4, seed=1)
    start = torch.tensor(0.3, dtype=F64), normal(12, seed=2)

    def g(squares: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda theta, x: theta.exp() * squares(x.view(3, 4)).mean() + 5 * (x**2).sum()

    fused = g(lambda x: torch.cdist(x, z, compute_mode=mode).square())
    if mode.endswith("necessary") and strategy != "difference":
        with rejects("no-second-derivative", "hypergradient", "strategy"):
            hypergradient(ones, fused, *start, solver=CG(), strategy=strategy)
        return
    have = hypergradient(ones, fused, *start, solver=CG(), strategy=strategy).value
    written_out = g(lambda x: (x[:, None] - z).square().sum(-1))
    want = hypergradient(ones, written_out, *start, solver=CG()).value
    torch.testing.assert_close(have, want, rtol=1e-8, atol=0)


def test_mse_loss_has_a_jvp() -> None:
    """Its derivative along x is a tensor of zeros without memory (pytorch issue 123996)."""
    a, y = normal(30, 3, seed=1), normal(30, seed=2)

    def f(t: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(a @ x, y)

    def g(t: Tensor, x: Tensor) -> Tensor:
        return t.exp() * f(t, x) + (x**2).sum()

    start = torch.zeros((), dtype=F64), torch.zeros(3, dtype=F64)
    have, want = (
        hypergradient(f, g, *start, solver=CG(), strategy=strategy).value
        for strategy in ("jvp", "vjp")
    )
    torch.testing.assert_close(have, want, rtol=1e-12, atol=0)


@every_strategy
@pytest.mark.parametrize(
    ("option", "code"),
    [({"max_norm": 1.0}, "loss-with-state"), ({"sparse": True}, "sparse-gradient")],
)
def test_a_loss_that_changes_x_or_has_sparse_gradients_is_rejected(
    option: dict[str, Any], code: str, strategy: Any
) -> None:
    table = torch.nn.Embedding(5, 2, **option)
    x = {"weight": torch.full((5, 2), 2.0)}

    def g(theta: Tensor, x: Tree) -> Tensor:
        return apart(theta, torch.func.functional_call(table, x, (torch.arange(5),)))

    f = lambda theta, x: x["weight"].sum()  # noqa: E731
    with rejects(code, "g"):
        hypergradient(f, g, torch.ones(2), x, solver=CG(), strategy=strategy)


@pytest.mark.parametrize(
    ("solver", "strategy"), [(CG(), "difference"), (MINRES(), "difference"), (MINRES(), "vjp")]
)
@pytest.mark.parametrize("seed", range(2))
def test_a_free_direction_keeps_the_derivative_of_the_solution(
    solver: Any, strategy: Any, seed: int
) -> None:
    """Softmax regression with an intercept: any constant may be added to it. By differences the
    rounding of the products was taken for curvature, and h was −4.84."""
    rows = normal(10, 5, seed=seed)
    y = torch.arange(10) % 3

    def g(decay: Tensor, x: Tensor) -> Tensor:
        fit = torch.nn.functional.cross_entropy(rows @ x[:15].view(5, 3) + x[15:], y)
        return fit + decay / 2 * x[:15].square().sum()

    decay = torch.tensor(100.0, dtype=F64)
    x = torch.zeros(18, dtype=F64)
    for _ in range(8):
        slope = torch.func.grad(g, argnums=1)(decay, x)
        x = x - torch.linalg.pinv(torch.func.hessian(g, argnums=1)(decay, x)) @ slope
    f = lambda decay, x: x[15] + 0 * decay  # noqa: E731
    estimate = hypergradient(f, g, decay, x, solver=solver, strategy=strategy)
    assert estimate.outcome is Outcome.STAGNATED
    assert float(estimate.solution.residual) <= 1
    assert float(estimate.solution.value.norm()) < 20
    assert abs(float(estimate.value)) < 1e-4
    if isinstance(solver, MINRES):
        assert float(estimate.solution.residual) == pytest.approx(3**-0.5, rel=1e-6)
        exact = hypergradient(f, g, decay, x, solver=solver)
        assert float(estimate.value) == pytest.approx(float(exact.value), rel=1e-3)
