"""Gauss–Newton products: against dense JᵀHJ, central differences and the Hessian, in the tasks,
and in `implicit`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, KEY, normal, rejects
from torch import Tensor

from hgms.gauss_newton import Composite, by_difference, gauss_newton, says_outputs
from hgms.hypergradients import Implicit
from hgms.methods.tilted import tilted
from hgms.solvers import CG
from hgms_core import Branch, Data, Outcome, Problem, Ravel, Tree, roles
from hgms_core.registry import Registry

ROWS = 7
CLASSES = 3


def logits(x: Tree, batch: Tree) -> Tensor:
    return torch.tanh(batch["a"] @ x["w1"].T + x["b1"]) @ x["w2"].T


def weighted(theta: Tree, x: Tree, z: Tensor, batch: Tree) -> Tensor:
    rows = -z.log_softmax(-1).gather(-1, batch["y"][:, None])[:, 0]
    return (theta["t"].sigmoid() * rows).mean() + 1e-3 * sum(
        (leaf * leaf).sum() for leaf in x.values()
    )


LOSS = Composite(outputs=logits, criterion=weighted)
THETA = {"t": normal(ROWS, seed=1)}
X = {"w1": normal(4, 5, seed=2), "b1": normal(4, seed=3), "w2": normal(CLASSES, 4, seed=4)}
BATCH = {"a": normal(ROWS, 5, seed=5), "y": torch.tensor([0, 1, 2, 0, 1, 2, 0])}
SPEC = Ravel.of(X)
EYE = torch.eye(SPEC.size, dtype=F64)


def matrix(loss: Any, theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """G, column by column."""
    spec = Ravel.of(x)
    product = gauss_newton(loss)
    eye = torch.eye(spec.size, dtype=F64)
    return torch.stack([spec.ravel(product(theta, x, batch, spec.unravel(e))) for e in eye], dim=1)


def hessian(loss: Any, theta: Tree, x: Tree, batch: Tree) -> Tensor:
    spec = Ravel.of(x)
    return torch.func.hessian(lambda flat: loss(theta, spec.unravel(flat), batch))(spec.ravel(x))


def test_it_is_the_dense_matrix() -> None:
    """G = Jᵀ (∇²_zz c) J + ∇²_xx c with the blocks written down: softmax's diag(p) − ppᵀ, and
    the weight decay's 2ω.
    """
    # [rows, classes, d]
    jacobian = torch.func.jacrev(lambda flat: logits(SPEC.unravel(flat), BATCH))(SPEC.ravel(X))
    chance = logits(X, BATCH).softmax(-1)
    middle = torch.diag_embed(chance) - chance[:, :, None] * chance[:, None, :]
    weights = THETA["t"].sigmoid() / ROWS
    dense = torch.einsum("n,ncd,nck,nke->de", weights, jacobian, middle, jacobian) + 2e-3 * EYE
    torch.testing.assert_close(matrix(LOSS, THETA, X, BATCH), dense, rtol=1e-12, atol=1e-13)


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
    x = {"w": normal(5, seed=7)}
    torch.testing.assert_close(
        matrix(loss, {}, x, BATCH), hessian(loss, {}, x, BATCH), rtol=1e-12, atol=1e-12
    )


class TestTilted:
    def test_the_operator_is_the_sum_of_both(self) -> None:
        above = {"a": normal(4, 5, seed=9), "y": torch.tensor([2, 1, 0, 1])}
        upper = Composite(
            outputs=logits,
            criterion=lambda t, x, z, b: -z.log_softmax(-1).gather(-1, b["y"][:, None]).mean(),
        )
        problem = Problem(
            theta0=THETA,
            x0=X,
            g=LOSS,
            f=upper,
            lower_data=Data.of(BATCH),
            upper_data=roles(above, (1, 1, 1)),
        )
        joint = tilted(problem, 0.7)
        batch = joint.lower_data.batch(None)
        total = matrix(LOSS, THETA, X, BATCH) + 0.7 * matrix(upper, THETA, X, above)
        torch.testing.assert_close(matrix(joint.g, THETA, X, batch), total, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(
            joint.g(THETA, X, batch), LOSS(THETA, X, BATCH) + 0.7 * upper(THETA, X, above)
        )

    def test_it_has_no_outputs_where_one_of_them_says_none(self) -> None:
        problem = Problem(theta0=THETA, x0=X, g=LOSS, f=lambda theta, x, batch: x["w1"].sum())
        assert not says_outputs(tilted(problem, 0.7).g)


TASKS = {
    "hyper-cleaning": {"train_size": 30, "validation_size": 20, "test_size": 10, "hidden": 3},
    "imbalanced-loss": {
        "validation_size": 20,
        "test_size": 20,
        "views": 0,
        "hidden": 3,
        "channels": (2, 2),
        "smooth": True,
    },
    "ridge-cv": {},
    "logistic-cv": {"dataset": "sklearn:iris"},
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_the_criterion_of_its_outputs(name: str) -> None:
    """The value is the loss's own, the operator positive semidefinite, and where the model is
    linear the Hessian.
    """
    problem = (
        Registry.load().get("task", name).target(**TASKS[name]).problem(0, torch.device("cpu"), F64)
    )
    theta = {key: leaf + 0.3 for key, leaf in problem.theta0.items()}
    x = {key: leaf + 0.1 * normal(*leaf.shape, seed=10) for key, leaf in problem.x0.items()}
    below = problem.lower_data.batch(None)
    above = problem.upper_data["differentiate"].batch(None)
    for loss, batch in ((problem.g, below), (problem.f, above)):
        assert says_outputs(loss)
        value = loss.criterion(theta, x, loss.outputs(x, batch), batch)
        torch.testing.assert_close(value, loss(theta, x, batch), rtol=1e-13, atol=0)
    product = gauss_newton(problem.g)
    linear = name in ("ridge-cv", "logistic-cv")
    for seed in range(3):
        v = {key: normal(*leaf.shape, seed=seed) for key, leaf in x.items()}
        image = product(theta, x, below, v)
        assert sum(float((v[key] * image[key]).sum()) for key in v) > 0
        if linear:
            slope = torch.func.grad(lambda at: problem.g(theta, at, below))
            for key, leaf in torch.func.jvp(slope, (x,), (v,))[1].items():
                torch.testing.assert_close(image[key], leaf, rtol=1e-11, atol=1e-13)


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
    v = SPEC.unravel(normal(SPEC.size, seed=6))
    ours = by_difference(loss)(THETA, X, BATCH, v)
    exact = gauss_newton(LOSS)(THETA, X, BATCH, v)
    torch.testing.assert_close(ours, exact, rtol=1e-7, atol=1e-9)
    with pytest.raises(RuntimeError, match="setup_context"):
        gauss_newton(loss)(THETA, X, BATCH, v)


class TestImplicit:
    PROBLEM = Problem(
        theta0=THETA,
        x0=X,
        g=LOSS,
        f=lambda theta, x, batch: logits(x, batch)[:, 0].square().mean(),
        lower_data=Data.of(BATCH),
        upper_data=roles({"a": normal(6, 5, seed=11)}, (1, 1, 1)),
    )

    def estimate(self, problem: Problem | None = None, **settings: Any) -> Any:
        estimator = Implicit(**{"solver": CG(ridge=1e-2, rtol=1e-12, max_steps=500), **settings})
        problem = problem or self.PROBLEM
        return estimator.estimate(problem, THETA, Branch(x=X), KEY, estimator.init(problem))[0]

    def test_it_is_equation_3_with_the_dense_gauss_newton_matrix(self) -> None:
        above = self.PROBLEM.upper_data["differentiate"].batch(None)
        flat = SPEC.ravel(X)
        b = torch.func.grad(lambda at: self.PROBLEM.f(THETA, SPEC.unravel(at), above))(flat)
        v = torch.linalg.solve(matrix(LOSS, THETA, X, BATCH) + 1e-2 * EYE, b)
        mixed = torch.func.jacrev(
            lambda t: torch.func.grad(lambda at: LOSS({"t": t}, SPEC.unravel(at), BATCH))(flat) @ v
        )(THETA["t"])
        estimate = self.estimate(operator="ggn")
        assert estimate.outcome is Outcome.CONVERGED
        torch.testing.assert_close(estimate.value["t"], -mixed, rtol=1e-8, atol=1e-11)
        assert estimate.curvature >= 1e-2

    def test_differences_of_the_outputs_give_it_as_well(self) -> None:
        ours = self.estimate(
            operator="ggn", strategy="difference", solver=CG(ridge=1e-2, rtol=1e-8, max_steps=500)
        )
        assert ours.outcome is Outcome.CONVERGED
        torch.testing.assert_close(
            ours.value["t"], self.estimate(operator="ggn").value["t"], rtol=1e-6, atol=1e-9
        )

    def test_the_hessian_ends_in_negative_curvature_here(self) -> None:
        assert self.estimate().outcome is Outcome.NEGATIVE_CURVATURE

    def test_a_loss_that_says_no_outputs_is_told_what_to_write(self) -> None:
        plain = Problem(
            theta0=THETA,
            x0=X,
            g=lambda *a: LOSS(*a),
            f=self.PROBLEM.f,
            upper_data=self.PROBLEM.upper_data,
        )
        with rejects("not-supported", "g"):
            self.estimate(plain, operator="ggn")

    def test_fresh_batches_are_rejected(self) -> None:
        with rejects("conflicting-options", "operator"):
            Implicit(solver=CG(), operator="ggn", batches="fresh")


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
@pytest.mark.parametrize("squares", ["written out", "mse_loss"])
def test_ggn_takes_plain_tensors_and_mse_loss(strategy: Any, squares: str) -> None:
    """A problem flattens θ and x, and its loss kept neither outputs nor criterion; the second
    derivative of mse_loss has no forward mode. Outputs are linear in x, so G is the Hessian."""
    rows = {"a": normal(30, 3, seed=1), "y": normal(30, seed=2)}

    def criterion(theta: Tensor, x: Tensor, z: Tensor, batch: Tree) -> Tensor:
        mean = torch.nn.functional.mse_loss(z, batch["y"])
        written = (z - batch["y"]).square().mean()
        fit = mean if squares == "mse_loss" else written
        return theta.exp() * fit + 0.01 * x.square().sum()

    problem = Problem(
        theta0=torch.tensor(0.0, dtype=F64),
        x0=normal(3, seed=3),
        f=lambda theta, x, batch: (batch["a"] @ x - batch["y"]).square().mean(),
        g=Composite(outputs=lambda x, batch: batch["a"] @ x, criterion=criterion),
        lower_data=rows,
        upper_data=rows,
    )
    values = [
        Implicit(solver=CG(ridge=0.01), operator=operator, strategy=how)
        .estimate(problem, problem.theta0, Branch(x=problem.x0), KEY, {"v": None})[0]
        .value["theta"]
        for operator, how in (("hessian", "vjp"), ("ggn", strategy))
    ]
    torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=0)
