"""Gauss–Newton products: against dense JᵀHJ, central differences and the Hessian, in the tasks,
and in `implicit`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, KEY, assert_same, normal, rejects
from torch import Tensor

from hgms.adapters import from_losses
from hgms.gauss_newton import Composite, by_difference, gauss_newton
from hgms.hypergradients import Implicit
from hgms.methods.tilt import tilt_problem
from hgms.solvers import CG
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.imbalanced import ImbalancedLoss, Layers
from hgms.tasks.regression import LogisticCv, RidgeCv
from hgms_core import Branch, Data, Outcome, Problem, Ravel, Tree, roles
from hgms_core.capabilities import HasOutputs, find

ROWS = 7


def logits(x: Tree, batch: Tree) -> Tensor:
    return torch.tanh(batch["a"] @ x["w1"].T + x["b1"]) @ x["w2"].T


def weighted(theta: Tree, x: Tree, z: Tensor, batch: Tree) -> Tensor:
    rows = -z.log_softmax(-1).gather(-1, batch["y"][:, None])[:, 0]
    decay = sum((leaf * leaf).sum() for leaf in x.values())
    return (theta["t"].sigmoid() * rows).mean() + 1e-3 * decay


LOSS = Composite(outputs=logits, criterion=weighted)
THETA = {"t": normal(ROWS, seed=1)}
X = {"w1": normal(4, 5, seed=2), "b1": normal(4, seed=3), "w2": normal(3, 4, seed=4)}
BATCH = {"a": normal(ROWS, 5, seed=5), "y": torch.tensor([0, 1, 2, 0, 1, 2, 0])}
SPEC = Ravel.of(X)
FLAT = SPEC.ravel(X)
EYE = torch.eye(SPEC.size, dtype=F64)


def matrix(loss: Any, theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """G, column by column."""
    spec, product = Ravel.of(x), gauss_newton(loss)
    eye = torch.eye(spec.size, dtype=F64)
    return torch.stack([spec.ravel(product(theta, x, batch, spec.unravel(e))) for e in eye], dim=1)


def test_it_is_the_dense_matrix() -> None:
    """G = Jᵀ (∇²_zz c) J + ∇²_xx c with the blocks written down: softmax's diag(p) − ppᵀ, and
    the weight decay's 2ω.
    """
    # [rows, classes, d]
    jacobian = torch.func.jacrev(lambda flat: logits(SPEC.unravel(flat), BATCH))(FLAT)
    chance = logits(X, BATCH).softmax(-1)
    middle = torch.diag_embed(chance) - chance[:, :, None] * chance[:, None, :]
    weights = THETA["t"].sigmoid() / ROWS
    dense = torch.einsum("n,ncd,nck,nke->de", weights, jacobian, middle, jacobian) + 2e-3 * EYE
    assert_same(matrix(LOSS, THETA, X, BATCH), dense, rtol=1e-12, atol=1e-13)


def test_a_criterion_that_joins_x_and_outputs_keeps_its_cross_terms() -> None:
    """c = ½ s² z², z = s²: [1, 2s] [[z², 2sz], [2sz, s²]] [1, 2s]ᵀ = z² + 8s²z + 4s⁴ = 13 s⁴."""
    loss = Composite(
        outputs=lambda x, b: x["s"] ** 2,
        criterion=lambda t, x, z, b: (0.5 * x["s"] ** 2 * z**2).sum(),
    )
    x = {"s": torch.tensor([1.5], dtype=F64)}
    torch.testing.assert_close(matrix(loss, {}, x, {}), 13 * x["s"][:, None] ** 4)


def test_linear_outputs_give_the_hessian_itself() -> None:
    loss = Composite(
        outputs=lambda x, b: b["a"] @ x["w"], criterion=lambda t, x, z, b: (z.exp() + z**2).sum()
    )
    w = normal(5, seed=7)
    hessian = torch.func.hessian(lambda w: loss({}, {"w": w}, BATCH))(w)
    assert_same(matrix(loss, {}, {"w": w}, BATCH), hessian, rtol=1e-12, atol=1e-12)


@pytest.mark.extended
def test_the_operator_of_a_tilted_level_is_the_sum_of_both() -> None:
    above = {"a": normal(4, 5, seed=9), "y": torch.tensor([2, 1, 0, 1])}
    upper = Composite(
        outputs=logits,
        criterion=lambda t, x, z, b: -z.log_softmax(-1).gather(-1, b["y"][:, None]).mean(),
    )
    problem = from_losses(
        theta0=THETA,
        x0=X,
        g=LOSS,
        f=upper,
        lower_data=Data.of(BATCH),
        upper_data=roles(above, (1, 1, 1)),
    )
    joint = tilt_problem(problem, 0.7)
    batch = joint.lower_data.batch(None)
    total = matrix(LOSS, THETA, X, BATCH) + 0.7 * matrix(upper, THETA, X, above)
    assert_same(matrix(joint.g, THETA, X, batch), total, rtol=1e-12, atol=1e-13)
    value = LOSS(THETA, X, BATCH) + 0.7 * upper(THETA, X, above)
    torch.testing.assert_close(joint.g(THETA, X, batch), value)
    assert (
        find(tilt_problem(evolve(problem, f=lambda t, x, b: x["w1"].sum()), 0.7).g, HasOutputs)
        is None
    )


@pytest.mark.parametrize(
    "task",
    [
        HyperCleaning(train_size=30, validation_size=20, test_size=10, hidden=3),
        ImbalancedLoss(
            validation_size=20,
            test_size=20,
            views=0,
            network=Layers(hidden=3, channels=(2, 2), smooth=True),
        ),
        RidgeCv(),
        LogisticCv(dataset="sklearn:iris"),
    ],
    ids=lambda task: task.name,
)
def test_a_task_is_the_criterion_of_its_outputs(task: Any) -> None:
    """The value is the loss's own, the operator positive semidefinite, and where the model is
    linear the Hessian.
    """
    problem = task.problem(0, torch.device("cpu"), F64)
    theta = {key: leaf + 0.3 for key, leaf in problem.theta0.items()}
    x = {key: leaf + 0.1 * normal(*leaf.shape, seed=10) for key, leaf in problem.x0.items()}
    below, above = problem.lower_data.batch(None), problem.upper_data["differentiate"].batch(None)
    for loss, batch in ((problem.g, below), (problem.f, above)):
        value = loss.criterion(theta, x, loss.outputs(x, batch), batch)
        assert_same(value, loss(theta, x, batch), rtol=1e-13)
    slope = torch.func.grad(lambda at: problem.g(theta, at, below))
    for seed in range(3):
        v = {key: normal(*leaf.shape, seed=seed) for key, leaf in x.items()}
        image = gauss_newton(problem.g)(theta, x, below, v)
        assert sum(float((v[key] * image[key]).sum()) for key in v) > 0
        if task.name in ("ridge-cv", "logistic-cv"):
            _, product = torch.func.jvp(slope, (x,), (v,))
            assert_same(image, product, rtol=1e-11, atol=1e-13)


def test_a_difference_of_the_outputs_is_all_that_it_asks_of_a_network() -> None:
    """Of one without a derivative in forward mode, and without a second one: those are refused."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            return slope

    loss = Composite(outputs=lambda x, batch: Once.apply(logits(x, batch)), criterion=weighted)
    at = (THETA, X, BATCH, SPEC.unravel(normal(SPEC.size, seed=6)))
    assert_same(by_difference(loss)(*at), gauss_newton(LOSS)(*at), rtol=1e-7, atol=1e-9)
    with pytest.raises(RuntimeError, match="setup_context"):
        gauss_newton(loss)(*at)


PROBLEM = from_losses(
    theta0=THETA,
    x0=X,
    g=LOSS,
    f=lambda theta, x, batch: logits(x, batch)[:, 0].square().mean(),
    lower_data=Data.of(BATCH),
    upper_data=roles({"a": normal(6, 5, seed=11)}, (1, 1, 1)),
)


def estimate(problem: Problem, rtol: float = 1e-12, **settings: Any) -> Any:
    estimator = Implicit(solver=CG(ridge=1e-2, rtol=rtol, max_steps=500), **settings)
    branch = Branch(x=problem.x0)
    return estimator.estimate(
        problem, problem.theta0, *branch.as_candidates(), KEY, estimator.init(problem)
    )[0]


def test_implicit_is_equation_3_with_the_dense_gauss_newton_matrix() -> None:
    above = PROBLEM.upper_data["differentiate"].batch(None)
    b = torch.func.grad(lambda at: PROBLEM.f(THETA, SPEC.unravel(at), above))(FLAT)
    v = torch.linalg.solve(matrix(LOSS, THETA, X, BATCH) + 1e-2 * EYE, b)
    mixed = torch.func.jacrev(
        lambda t: torch.func.grad(lambda at: LOSS({"t": t}, SPEC.unravel(at), BATCH))(FLAT) @ v
    )(THETA["t"])
    exact = estimate(PROBLEM, operator="ggn")
    ours = estimate(PROBLEM, operator="ggn", strategy="difference", rtol=1e-8)
    assert exact.outcome is ours.outcome is Outcome.CONVERGED
    assert_same(exact.value["t"], -mixed, rtol=1e-8, atol=1e-11)
    assert_same(ours.value["t"], exact.value["t"], rtol=1e-6, atol=1e-9)
    assert exact.solution.curvature >= 1e-2
    # the Hessian is not positive definite here
    assert estimate(PROBLEM).outcome is Outcome.NEGATIVE_CURVATURE


def test_what_has_no_gauss_newton_matrix_is_refused() -> None:
    with rejects("not-supported", "g"):
        estimate(evolve(PROBLEM, g=lambda *at: LOSS(*at)), operator="ggn")
    with rejects("conflicting-options", "operator"):
        Implicit(solver=CG(), operator="ggn", batches="fresh")


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
@pytest.mark.parametrize("squares", ["written out", "mse_loss"])
def test_ggn_takes_plain_tensors_and_mse_loss(strategy: Any, squares: str) -> None:
    """A problem flattens θ and x, and its loss kept neither outputs nor criterion; the second
    derivative of mse_loss has no forward mode. Outputs are linear in x, so G is the Hessian."""
    rows = {"a": normal(30, 3, seed=1), "y": normal(30, seed=2)}

    def criterion(theta: Tensor, x: Tensor, z: Tensor, batch: Tree) -> Tensor:
        written = (z - batch["y"]).square().mean()
        mean = torch.nn.functional.mse_loss(z, batch["y"])
        return theta.exp() * (mean if squares == "mse_loss" else written) + 0.01 * x.square().sum()

    problem = from_losses(
        theta0=torch.tensor(0.0, dtype=F64),
        x0=normal(3, seed=3),
        f=lambda theta, x, batch: (batch["a"] @ x - batch["y"]).square().mean(),
        g=Composite(outputs=lambda x, batch: batch["a"] @ x, criterion=criterion),
        lower_data=rows,
        upper_data=rows,
    )
    ours, hessian = (
        estimate(problem, operator=operator, strategy=how).value["theta"]
        for operator, how in (("ggn", strategy), ("hessian", "vjp"))
    )
    assert_same(ours, hessian, rtol=1e-6)
