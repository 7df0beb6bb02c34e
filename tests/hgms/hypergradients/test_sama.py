"""SAMA against double backward through Adam's step, its paper's diagonal, and its method worked
out by a loop of its own.
"""

from __future__ import annotations

import pytest
import torch
from support.helpers import F64, KEY, assert_same, network_problem, normal
from torch import Tensor

from hgms.generators.branches import Branches
from hgms.hypergradients import Sama
from hgms.runs import RunConfig
from hgms_core import Branch, Pipeline, Problem, Tree

PROBLEM = network_problem(rows=12)
THETA = PROBLEM.theta0
BETAS = (0.8, 0.95)
RATE = 0.3
BELOW = PROBLEM.lower_data.whole
ABOVE = PROBLEM.upper_data["differentiate"].whole


def branch() -> Branch:
    """A branch of three AdamW steps, with its moments."""
    generator = Branches(count=2, steps=3, optimizer="adamw", lr=0.05, betas=BETAS)
    return generator.propose(PROBLEM, THETA, generator.init(PROBLEM, KEY), KEY).branch(
        torch.tensor(1)
    )


def next_iterate(x: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Adam's step, without bias corrections."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g**2
    return x - RATE * m / (v.sqrt() + 1e-8)


@pytest.mark.parametrize(("derivative", "rtol"), [("exact", 1e-10), ("difference", 1e-6)])
def test_it_is_double_backward_through_the_step_of_adam(derivative: str, rtol: float) -> None:
    at = branch()
    leaves, x = (
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        for tree in (THETA, at.x)
    )
    grads = torch.autograd.grad(PROBLEM.g(leaves, x, BELOW), list(x.values()), create_graph=True)
    after = [
        next_iterate(at.x[n], g, at.aux[f"m.{n}"], at.aux[f"v.{n}"])
        for n, g in zip(x, grads, strict=True)
    ]
    loss = PROBLEM.f(leaves, x, ABOVE)
    slopes = torch.autograd.grad(loss, [*leaves.values(), *x.values()], retain_graph=True)
    direct = slopes[: len(leaves)]
    slope = slopes[len(leaves) :]
    through = torch.autograd.grad(after, list(leaves.values()), slope)
    expected = {name: a + b for name, a, b in zip(leaves, direct, through, strict=True)}
    sama = Sama(lr=RATE, betas=BETAS, derivative=derivative)
    estimate, _ = sama.estimate(PROBLEM, THETA, at, KEY, {})
    assert_same(estimate.value, expected, rtol=rtol, atol=rtol * 1e-3)
    assert_same(estimate.upper_loss, loss.detach(), rtol=1e-12)
    assert_same(
        estimate.lower_gradient_norm,
        torch.cat([g.detach().reshape(-1) for g in grads]).norm(),
        rtol=1e-12,
    )


def test_its_diagonal_is_that_of_the_paper() -> None:
    # g = ½|x|² − θ·x and f = c·x, so ∇²_θx g = −I and h = D c, read off without a derivative of
    # ours.
    c = normal(4, seed=1)
    theta = normal(4, seed=2)
    x = normal(4, seed=3)
    m = normal(4, seed=4)
    v = normal(4, seed=5).square()
    problem = Problem(
        theta0={"t": theta},
        x0={"x": x},
        g=lambda t, x, _: 0.5 * x["x"].square().sum() - (t["t"] * x["x"]).sum(),
        f=lambda t, x, _: (c * x["x"]).sum(),
    )
    sama = Sama(lr=RATE, betas=BETAS, eps=1e-30, derivative="exact")
    estimate, _ = sama.estimate(
        problem, problem.theta0, Branch(x={"x": x}, aux={"m.x": m, "v.x": v}), KEY, {}
    )
    (b1, b2), g = BETAS, x - theta
    diagonal = (
        RATE * ((1 - b1) * b2 * v - b1 * (1 - b2) * m * g) / (b2 * v + (1 - b2) * g**2) ** 1.5
    )
    assert_same(estimate.value["t"], diagonal * c, rtol=1e-10)


def test_without_adams_moments_the_step_is_of_gradient_descent() -> None:
    at = branch()
    momentum = {name: leaf for name, leaf in at.aux.items() if name.startswith("m.")}
    plain, with_momentum = (
        Sama(lr=RATE, derivative="exact")
        .estimate(PROBLEM, THETA, Branch(x=at.x, aux=aux), KEY, {})[0]
        .value
        for aux in ({}, momentum)
    )
    leaves, x = (
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        for tree in (THETA, at.x)
    )
    grads = torch.autograd.grad(PROBLEM.g(leaves, x, BELOW), list(x.values()), create_graph=True)
    above = PROBLEM.f(leaves, x, ABOVE)
    slopes = torch.autograd.grad(above, [*leaves.values(), *x.values()], retain_graph=True)
    through = torch.autograd.grad(grads, list(leaves.values()), slopes[len(leaves) :])
    expected = {name: a - RATE * b for name, a, b in zip(leaves, slopes, through, strict=False)}
    assert_same(plain, expected, rtol=1e-10, atol=1e-14)
    assert_same(with_momentum, plain)


def test_the_method_by_hand() -> None:
    # g = ½(x − θ)² (Hessian 1, mixed derivative −1) and f = ½(x − 1)²: two AdamW steps, then D of a
    # third.
    problem = Problem(
        theta0={"t": torch.full((1,), 3.0, dtype=F64)},
        x0={"x": torch.zeros(1, dtype=F64)},
        g=lambda t, x, _: 0.5 * (x["x"] - t["t"]).square().sum(),
        f=lambda t, x, _: 0.5 * (x["x"] - 1).square().sum(),
    )
    parts = {
        "generator": {"steps": 2, "lr": 0.1},
        "hypergradient": {"lr": 0.1},
        "outer": {"name": "sgd", "lr": 0.5},
    }
    table = {"task": "quadratic", "method": {"name": "sama", **parts}, "budget": "1 steps"}
    method = RunConfig.from_dict(table).method
    assert isinstance(method, Pipeline)
    x = 0.0
    m = 0.0
    v = 0.0
    theta = 3.0
    count = 0
    state = method.init(problem, 0)
    for _ in range(3):
        state, _ = method.step(problem, state)
        for _ in range(2):
            count = count + 1
            g = x - theta
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g**2
            x -= 0.1 * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)) ** 0.5 + 1e-8)
        g = x - theta
        d = 0.1 * (0.1 * 0.999 * v - 0.9 * 0.001 * m * g) / (0.999 * v + 0.001 * g**2) ** 1.5
        theta -= 0.5 * d * (x - 1)
        assert float(state["theta"]["t"]) == pytest.approx(theta, rel=1e-6)
        assert float(state["x"]["x"]) == pytest.approx(x, rel=1e-6)


def test_its_cost_counts_what_goes_through_g() -> None:
    def cost(sama: Sama) -> dict[str, int]:
        return sama.estimate(PROBLEM, THETA, branch(), KEY, {})[0].cost.numbers()

    counts = cost(Sama(batch_size=5, upper_batch_size=4))
    assert counts == {
        **dict.fromkeys(counts, 0),
        "lower_gradients": 1,
        "upper_gradients": 1,
        "cross_products": 1,
        "rows": 19,
    }
    assert cost(Sama(batch_size=5, upper_batch_size=4, derivative="exact"))["rows"] == 14


def test_the_displacement_reaches_the_difference() -> None:
    def value(displacement: float | None) -> Tree:
        return (
            Sama(lr=RATE, displacement=displacement)
            .estimate(PROBLEM, THETA, branch(), KEY, {})[0]
            .value
        )

    exact = Sama(lr=RATE, derivative="exact").estimate(PROBLEM, THETA, branch(), KEY, {})[0].value
    off = [float((value(length)["weights"] - exact["weights"]).norm()) for length in (0.2, 0.1)]
    # a central difference: the error falls with its square
    assert off[0] / off[1] == pytest.approx(4, rel=0.1)
