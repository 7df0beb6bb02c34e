"""K-FAC through curvlinops: its factors against their definition, and where it is exact."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from support.helpers import F64, KEY, assert_same, finite_differences, normal
from torch import Tensor

from hgms.adapters import from_losses
from hgms.contrib import KFAC
from hgms.contrib.kfac import Factored
from hgms.gauss_newton import Composite, gauss_newton
from hgms.hypergradients import Implicit
from hgms.methods.tilt import tilt_problem
from hgms.runs import RunConfig
from hgms_core import Branch, Data, Outcome, Problem, Ravel, Tree, roles

ROWS = 9
CLASSES = 3
OMEGA = 1e-2
RIDGE = 0.1


def deep(x: Tree, batch: Tree) -> Tensor:
    return F.linear(torch.tanh(F.linear(batch["a"], x["w1"], x["b1"])), x["w2"], x["b2"])


def shallow(x: Tree, batch: Tree) -> Tensor:
    return F.linear(batch["a"], x["w"], x["b"])


def weighted(theta: Tree, x: Tree, z: Tensor, batch: Tree) -> Tensor:
    losses = -z.log_softmax(-1).gather(-1, batch["y"][:, None])[:, 0]
    return (theta["t"][batch["index"]].sigmoid() * losses).mean() + OMEGA * sum(
        (leaf * leaf).sum() for leaf in x.values()
    )


DEEP = Composite(outputs=deep, criterion=weighted)
SHALLOW = Composite(outputs=shallow, criterion=weighted)
THETA = {"t": normal(ROWS, seed=1)}
X = {
    "w1": normal(4, 5, seed=2),
    "b1": normal(4, seed=3),
    "w2": normal(CLASSES, 4, seed=4),
    "b2": normal(CLASSES, seed=5),
}
FLAT = {"b": normal(CLASSES, seed=6), "w": normal(CLASSES, 5, seed=7)}
DATA = Data.of({"a": normal(ROWS, 5, seed=8), "y": torch.arange(ROWS) % CLASSES})
BATCH = DATA.batch(None)
ONE = DATA.batch(torch.tensor([3]))
UPPER = roles({"a": normal(6, 5, seed=10), "y": torch.arange(6) % CLASSES}, (1, 1, 1))
PROBLEM = from_losses(
    theta0=THETA,
    x0=FLAT,
    g=SHALLOW,
    f=lambda t, x, b: -shallow(x, b).log_softmax(-1).gather(-1, b["y"][:, None]).mean(),
    lower_data=DATA,
    upper_data=UPPER,
)
needs_curvlinops = pytest.mark.skipif(
    find_spec("curvlinops") is None, reason="its factors come from curvlinops"
)


def inverse(loss: Any, x: Tree, batch: Tree) -> Tensor:
    """M⁻¹, dense: the answers for the columns of the identity."""
    solver = KFAC(ridge=RIDGE, max_steps=0).at(loss, THETA, x, batch)
    eye = torch.eye(Ravel.of(x).size, dtype=F64)
    return torch.stack([solver.solve(lambda v: v, e).value for e in eye], dim=1)


@needs_curvlinops
@pytest.mark.parametrize(
    ("loss", "x", "layers"),
    [(SHALLOW, FLAT, ("b w",)), (DEEP, X, ("w1 b1", "w2 b2"))],
    ids=["one layer", "two layers"],
)
def test_with_one_row_it_is_the_inverse_of_the_layers_blocks(
    loss: Any, x: Tree, layers: tuple[str, ...]
) -> None:
    spec = Ravel.of(x)
    eye = torch.eye(spec.size, dtype=F64)
    product = gauss_newton(loss)
    whole = torch.stack([spec.ravel(product(THETA, x, ONE, spec.unravel(e))) for e in eye], dim=1)
    layer_of = {name: float(i) for i, layer in enumerate(layers) for name in layer.split()}
    owner = spec.ravel({name: torch.full_like(leaf, layer_of[name]) for name, leaf in x.items()})
    exact = torch.linalg.inv(whole * (owner[:, None] == owner) + RIDGE * eye)
    torch.testing.assert_close(inverse(loss, x, ONE), exact, rtol=1e-8, atol=1e-10)


def by_definition(parts: list[tuple[Tree, Tensor]]) -> Tensor:
    """(B ⊗ A + (γ + 2ω)I)⁻¹ of a softmax layer: A = mean of [a, 1][a, 1]ᵀ, B = Σ w_i (diag(p) −
    ppᵀ), with weights.
    """
    inputs = torch.cat([batch["a"] for batch, _ in parts])
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=F64)], dim=1)
    outside = torch.zeros(CLASSES, CLASSES, dtype=F64)
    for batch, weight in parts:
        chance = shallow(FLAT, batch).softmax(-1)
        outside += torch.einsum(
            "n,ncd->cd", weight, torch.diag_embed(chance) - chance[:, :, None] * chance[:, None, :]
        )
    joint = torch.kron(outside, inputs.T @ inputs / len(inputs)) + (RIDGE + 2 * OMEGA) * torch.eye(
        18, dtype=F64
    )
    place = torch.arange(18).reshape(CLASSES, 6)
    order = torch.cat([place[:, 5], place[:, :5].flatten()])  # b comes before w in x
    return torch.linalg.inv(joint)[order][:, order]


@needs_curvlinops
def test_its_factors_are_those_of_the_definition_also_of_a_tilted_loss() -> None:
    below = (BATCH, THETA["t"].sigmoid() / ROWS)
    assert_same(inverse(SHALLOW, FLAT, BATCH), by_definition([below]), rtol=1e-8, atol=1e-10)
    upper = Composite(
        outputs=shallow,
        criterion=lambda t, x, z, b: -z.log_softmax(-1).gather(-1, b["y"][:, None]).mean(),
    )
    above = {"a": normal(4, 5, seed=9), "y": torch.tensor([2, 1, 0, 1])}
    problem = evolve(PROBLEM, f=upper, upper_data=roles(above, (1, 1, 1)))
    joint = tilt_problem(problem, 0.7)
    exact = by_definition([below, (above, torch.full((4,), 0.7 / 4, dtype=F64))])
    found = inverse(joint.g, FLAT, joint.lower_data.batch(None))
    assert_same(found, exact, rtol=1e-8, atol=1e-10)


def solved(theta: Tree) -> Tree:
    """The lower solution of the shallow, strongly convex loss, by Newton's method."""
    spec = Ravel.of(FLAT)
    flat = torch.zeros(18, dtype=F64)
    for _ in range(12):

        def value(at: Tensor) -> Tensor:
            return SHALLOW(theta, spec.unravel(at), BATCH)

        flat = flat - torch.linalg.solve(
            torch.func.hessian(value)(flat), torch.func.grad(value)(flat)
        )
    return spec.unravel(flat)


def estimate(estimator: Any, problem: Problem, x: Tree) -> Any:
    state = estimator.init(problem)
    return estimator.estimate(problem, problem.theta0, *Branch(x=x).as_candidates(), KEY, state)[0]


@needs_curvlinops
@pytest.mark.parametrize("operator", ["hessian", "ggn"])
def test_before_conjugate_gradients_it_is_the_slope_of_the_value_function(operator: Any) -> None:
    found = estimate(Implicit(solver=KFAC(rtol=1e-11), operator=operator), PROBLEM, solved(THETA))
    assert found.outcome is Outcome.CONVERGED
    above = UPPER["differentiate"].batch(None)
    slope = finite_differences(lambda theta: PROBLEM.f(theta, solved(theta), above), THETA)
    torch.testing.assert_close(found.value["t"], slope["t"], rtol=1e-6, atol=1e-9)


def dense_inverse_of_two_layers(theta: Tree, ridge: float) -> Tensor:
    """⊕ (B_l ⊗ A_l + (γ + 2ω)I)⁻¹ of the two layers of ``deep``: A_l the mean of [a, 1][a, 1]ᵀ of a
    layer's inputs, B_l the sum of Jᵀ w_i (diag(p) − ppᵀ) J over rows, J the derivative of a row's
    outputs in those of the layer.
    """
    hidden = F.linear(BATCH["a"], X["w1"], X["b1"])
    chance = deep(X, BATCH).softmax(-1)
    within = torch.diag_embed(chance) - chance[:, :, None] * chance[:, None, :]
    within = within * (theta["t"].sigmoid() / ROWS)[:, None, None]
    jacobian = X["w2"][None] * (1 - torch.tanh(hidden).square())[:, None, :]  # [n, C, 4]
    first = torch.einsum("nch,ncd,ndk->hk", jacobian, within, jacobian)
    factors = {"1": (BATCH["a"], first), "2": (torch.tanh(hidden), within.sum(0))}
    spec = Ravel.of(X)
    inverses = torch.zeros(spec.size, spec.size, dtype=F64)
    places = spec.unravel(torch.arange(spec.size, dtype=F64))
    for layer, (inputs, outside) in factors.items():
        inputs = torch.cat([inputs, torch.ones(ROWS, 1, dtype=F64)], dim=1)
        joint = torch.kron(outside.contiguous(), inputs.T @ inputs / ROWS)
        at = torch.cat([places[f"w{layer}"], places[f"b{layer}"][:, None]], dim=1).flatten().long()
        inverses[at[:, None], at[None]] = torch.linalg.inv(
            joint + (ridge + 2 * OMEGA) * torch.eye(len(at), dtype=F64)
        )
    return inverses


@needs_curvlinops
def test_the_method_s_hypergradient_is_that_of_the_dense_inverse() -> None:
    def f(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return -deep(x, batch).log_softmax(-1).gather(-1, batch["y"][:, None]).mean()

    problem = evolve(PROBLEM, x0=X, g=DEEP, f=f)
    table = {"task": "quadratic", "method": "kfac", "budget": "1 steps"}
    method = evolve(
        RunConfig.from_dict(table).method.hypergradient, batch_size=None, upper_batch_size=None
    )
    found = estimate(method, problem, X)

    theta, x = (
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()} for tree in (THETA, X)
    )
    spec = Ravel.of(X)
    above = torch.autograd.grad(f(theta, x, UPPER["differentiate"].batch(None)), list(x.values()))
    v = dense_inverse_of_two_layers(THETA, method.solver.ridge) @ spec.ravel_leaves(above)
    grads = torch.autograd.grad(DEEP(theta, x, BATCH), list(x.values()), create_graph=True)
    mixed = torch.autograd.grad(grads, [theta["t"]], spec.unravel_leaves(v))[0]
    torch.testing.assert_close(found.value["t"], -mixed, rtol=1e-8, atol=1e-12)


def test_the_inverse_itself_is_clipped_and_says_so_where_it_is_exact() -> None:
    b = normal(5, seed=3)
    exact, clipped = (
        Factored(settings=KFAC(ridge=1.0, rtol=1e-9, clip=clip), inverse=lambda r: r / 3).solve(
            lambda v: 2 * v, b
        )
        for clip in (None, 0.1)
    )
    assert (exact.outcome, clipped.products) == (Outcome.CONVERGED, 1)
    torch.testing.assert_close(exact.value, b / 3)
    torch.testing.assert_close(clipped.value, 0.1 * b / b.norm())
