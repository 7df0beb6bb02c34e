"""SAMA against double backward through Adam's step, its paper's diagonal, and its method worked
out by a loop of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.field_problems import run
from support.helpers import F64, KEY, assert_same, network_problem, normal
from torch import Tensor

from hgms.generators.branches import Branches
from hgms.hypergradients import Sama
from hgms.optim import AdamW
from hgms.runs import RunConfig
from hgms_core import Branch, Problem

PROBLEM = network_problem(rows=12)
THETA = PROBLEM.theta0
BETAS = (0.8, 0.95)
RATE = 0.3
GENERATOR = Branches(count=2, steps=3, optimizer=AdamW(lr=0.05, betas=BETAS))
# three AdamW steps, with their moments
BRANCH = GENERATOR.propose(PROBLEM, THETA, GENERATOR.init(PROBLEM, KEY), KEY).branch(
    torch.tensor(1)
)


def estimate(branch: Branch = BRANCH, **options: Any) -> Any:
    sama = Sama(**{"lr": RATE, "betas": BETAS, **options})
    return sama.estimate(PROBLEM, THETA, *branch.as_candidates(), KEY, {})[0]


def descends(x: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return x - RATE * g


def adam(x: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Adam's step, without bias corrections."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g**2
    return x - RATE * m / (v.sqrt() + 1e-8)


@pytest.mark.parametrize(("derivative", "rtol"), [("exact", 1e-10), ("difference", 1e-6)])
@pytest.mark.parametrize("kept", ["moments", "momentum", "nothing"])
def test_it_is_double_backward_through_the_step(kept: str, derivative: str, rtol: float) -> None:
    """Of Adam, or without its moments of gradient descent."""
    leaves, x = (
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        for tree in (THETA, BRANCH.x)
    )
    below, above = PROBLEM.lower_data.whole, PROBLEM.upper_data["differentiate"].whole
    grads = torch.autograd.grad(PROBLEM.g(leaves, x, below), list(x.values()), create_graph=True)
    step = adam if kept == "moments" else descends
    after = [
        step(BRANCH.x[n], g, BRANCH.aux[f"m.{n}"], BRANCH.aux[f"v.{n}"])
        for n, g in zip(x, grads, strict=True)
    ]
    loss = PROBLEM.f(leaves, x, above)
    slopes = torch.autograd.grad(loss, [*leaves.values(), *x.values()], retain_graph=True)
    through = torch.autograd.grad(after, list(leaves.values()), slopes[len(leaves) :])
    expected = {name: a + b for name, a, b in zip(leaves, slopes, through, strict=False)}
    starts = {"moments": ("m.", "v."), "momentum": ("m.",), "nothing": ()}[kept]
    aux = {name: leaf for name, leaf in BRANCH.aux.items() if name.startswith(starts)}
    found = estimate(Branch(x=BRANCH.x, aux=aux), derivative=derivative)
    assert_same(found.value, expected, rtol=rtol, atol=rtol * 1e-3)
    assert_same(found.upper_loss, loss.detach(), rtol=1e-12)
    length = torch.cat([g.detach().reshape(-1) for g in grads]).norm()
    assert_same(found.lower_gradient_norm, length, rtol=1e-12)


def test_its_diagonal_is_that_of_the_paper() -> None:
    # g = ½|x|² − θ·x and f = c·x, so ∇²_θx g = −I and h = D c, read off without a derivative of
    # ours.
    c, theta, x, m = (normal(4, seed=seed) for seed in range(1, 5))
    v = normal(4, seed=5).square()
    problem = Problem(
        theta0={"t": theta},
        x0={"x": x},
        g=lambda t, x, _: 0.5 * x["x"].square().sum() - (t["t"] * x["x"]).sum(),
        f=lambda t, x, _: (c * x["x"]).sum(),
    )
    sama = Sama(lr=RATE, betas=BETAS, eps=1e-30, derivative="exact")
    branch = Branch(x={"x": x}, aux={"m.x": m, "v.x": v})
    found, _ = sama.estimate(problem, problem.theta0, *branch.as_candidates(), KEY, {})
    (b1, b2), g = BETAS, x - theta
    diagonal = (
        RATE * ((1 - b1) * b2 * v - b1 * (1 - b2) * m * g) / (b2 * v + (1 - b2) * g**2) ** 1.5
    )
    assert_same(found.value["t"], diagonal * c, rtol=1e-10)


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
        "generator": {"steps": 2, "optimizer": {"lr": 0.1}},
        "hypergradient": {"lr": 0.1},
        "outer": {"name": "sgd", "lr": 0.5},
    }
    table = {"task": "quadratic", "method": {"name": "sama", **parts}, "budget": "1 steps"}
    found_theta, found_x, _ = run(RunConfig.from_dict(table).method, problem, 3)
    theta, x, m, v = 3.0, 0.0, 0.0, 0.0
    for count in range(1, 7):
        g = x - theta
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        x -= 0.1 * (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)) ** 0.5 + 1e-8)
        if count % 2 == 0:
            g = x - theta
            d = 0.1 * (0.1 * 0.999 * v - 0.9 * 0.001 * m * g) / (0.999 * v + 0.001 * g**2) ** 1.5
            theta -= 0.5 * d * (x - 1)
    found = (float(found_theta["t"]), float(found_x["x"]))
    assert found == pytest.approx((theta, x), rel=1e-6)
