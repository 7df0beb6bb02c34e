"""Logistic regression with one penalty per feature on a real table; its lower level solved by Newton's method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import attrs
import numpy as np
import torch
from attrs import field
from torch import Tensor

from hgms_core import DataError, Key, NumericalError, Problem, Tree
from hgms_fields import frozen, positive
from hgms_task_regression.tables import METRICS, TRAITS, load_table, penalty, problem_of, split, split_shares, table_name


def scores(x: Tree, a: Tensor) -> Tensor:
    """``[rows, classes]``. Two classes share one vector of coefficients: the first one's score is 0."""
    linear = a @ x["x"].T
    return torch.cat([torch.zeros_like(linear), linear], dim=-1) if x["x"].shape[-2] == 1 else linear


def criterion(z: Tensor, batch: Tree) -> Tensor:
    return -z.log_softmax(-1).gather(-1, batch["label"].unsqueeze(-1)).mean()


def fit(x: Tree, batch: Tree) -> Tensor:
    return criterion(scores(x, batch["a"]), batch)


@final
@attrs.frozen(eq=False)
class LogisticClosedForm:
    """x*(θ) by Newton's method, and from it F(θ) and ∇F(θ) by one dense solve. In float64.

    g is strongly convex with constant μ = min_j e^{θ_j}, so Newton's method stops where ‖∇_x g‖ ≤ μ · ``tolerance``: then
    ‖x − x*(θ)‖ ≤ ``tolerance``. A problem of k = features × scores coefficients takes about ten k × k solves. Raises
    NumericalError if that is not reached (penalties that vanish beside the rounding of the losses).
    """

    train: Tree
    validation: Tree
    vectors: int
    tolerance: float = 1e-8
    max_steps: int = 100

    def _derivatives(self, theta: Tree, x: Tree) -> tuple[Tensor, Tensor]:
        """(∇_x g, ∇²_xx g) as a vector and a matrix over the flattened coefficients."""
        a, size = self.train["a"], self.vectors
        chance = scores(x, a).softmax(-1)
        hit = torch.nn.functional.one_hot(self.train["label"], chance.shape[-1]).to(a.dtype)
        drop = chance.shape[-1] - size  # the first class has no coefficients where there are two
        chance, hit = chance[:, drop:], hit[:, drop:]
        penalty = theta["log_penalty"].exp()
        gradient = (chance - hit).T @ a / len(a) + penalty * x["x"]
        d = a.shape[1]
        hessian = a.new_empty(size, d, size, d)
        for i in range(size):
            for j in range(size):
                weight = chance[:, i] * (int(i == j) - chance[:, j])
                hessian[i, :, j, :] = (a * weight[:, None]).T @ a / len(a)
        hessian = hessian.reshape(size * d, size * d)
        return gradient.flatten(), hessian + torch.diag(penalty.repeat(size))

    @torch.no_grad()
    def solution(self, theta: Tree) -> Tree:
        """x*(θ), from 0."""
        x = {"x": self.train["a"].new_zeros(self.vectors, self.train["a"].shape[1])}
        value = fit(x, self.train) + penalty(theta, x)
        target = self.tolerance * theta["log_penalty"].min().exp()
        for _ in range(self.max_steps):
            gradient, hessian = self._derivatives(theta, x)
            if torch.linalg.vector_norm(gradient) <= target:
                return x
            step = torch.linalg.solve(hessian, gradient)
            decrement, length = gradient @ step, 1.0
            while True:  # half the step until g falls by a part of what its slope promises, or rounding decides
                moved = {"x": x["x"] - length * step.reshape(x["x"].shape)}
                after = fit(moved, self.train) + penalty(theta, moved)
                if after <= value - 0.25 * length * decrement or decrement <= 1e-12 * (1 + value.abs()) or length < 1e-10:
                    break
                length /= 2
            x, value = moved, after
        raise NumericalError(
            f"the lower level was not solved in {self.max_steps} Newton steps: ‖∇_x g‖ = "
            f"{float(torch.linalg.vector_norm(self._derivatives(theta, x)[0])):.3g}, asked for {float(target):.3g}\n"
            "  raise the penalties"
        )

    def value(self, theta: Tree) -> Tensor:
        """F(θ) = f(x*(θ))."""
        return fit(self.solution(theta), self.validation)

    def hypergradient(self, theta: Tree) -> Tree:
        """∂F/∂θ_j = −e^{θ_j} Σ_c x*_{cj} v_{cj} with ∇²_xx g v = ∇f(x*)."""
        return {"log_penalty": self._slope(theta, self.solution(theta))}

    def _slope(self, theta: Tree, x: Tree) -> Tensor:
        leaf = x["x"].clone().requires_grad_()
        with torch.enable_grad():
            slope = torch.autograd.grad(fit({"x": leaf}, self.validation), leaf)[0]
        v = torch.linalg.solve(self._derivatives(theta, x)[1], slope.flatten()).reshape(slope.shape)
        return -theta["log_penalty"].exp() * (x["x"] * v).sum(0)

    def exactly(self, theta: Tree) -> tuple[Tree, Tensor, Tensor]:
        """(x*(θ), F(θ), ‖∇F(θ)‖) with the lower level solved once."""
        x = self.solution(theta)
        return x, fit(x, self.validation), torch.linalg.vector_norm(self._slope(theta, x))


@final
@frozen(kw_only=True)
class LogisticCv:
    """Logistic regression on a real table: one log-penalty per feature, chosen on validation rows.

    With CE the cross-entropy of the softmax of the scores x_cᵀa (of 0 and xᵀa for two classes)::

        g(θ, x) = (1/n) Σ_i CE(x a_i, c_i) + ½ Σ_j e^{θ_j} Σ_c x_{cj}²,        f(x) = (1/m) Σ_i CE(x a'_i, c'_i),     θ0 = 0

    Features are standardised with the training rows' means and standard deviations; the intercept is the coefficient of a last
    feature that is 1, and has a penalty like the others, so that g is strongly convex. Θ = [−bound, bound]^(d+1), by
    projection.

    Use when methods are to be compared on real data with the exact F at hand, and a lower level that is not quadratic. Avoid
    for tables of more than a few thousand coefficients: ``evaluate`` factors their Hessian about ten times.

    Arguments:
        dataset: ``sklearn:breast-cancer`` (or any of scikit-learn's embedded tables), ``libsvm:FILE``, ``openml:NAME@VERSION``
            or ``hub:NAME@REVISION``; the distinct targets are the classes.
        shares: of the rows that train, validate and test, drawn from the seed. ``bound``: see Θ.

    Errors: DataError (a file that is missing or damaged, missing values, a target with one value only or with more than a
    tenth as many as there are rows), MissingExtra (scikit-learn or datasets). Where the lower level cannot be solved to
    tolerance, the three metrics that need it are NaN.

    >>> task, cpu, double = LogisticCv(dataset="sklearn:iris"), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> numbers = problem.evaluate(problem.theta0, exact.solution(problem.theta0))
    >>> numbers["lower_distance"], numbers["upper_loss"] == numbers["value_function"]
    (0.0, True)

    Source: standard; the regularisation-selection problem of Pedregosa (2016) and of the field's benchmark (Dagréou et al.
    2022).
    """

    name: ClassVar[str] = "logistic-cv"
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = TRAITS
    metrics: ClassVar[Mapping[str, bool]] = METRICS | {"test_accuracy": True}

    dataset: str = field(default="sklearn:breast-cancer", validator=table_name)
    shares: tuple[float, float, float] = field(default=(0.5, 0.25, 0.25), validator=split_shares)
    bound: float = field(default=10.0, validator=positive)

    def _rows(self, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[list[Tree], int]:
        """(train, validation and test, how many classes)."""
        table = load_table(self.dataset)
        names, label = np.unique(table.target, return_inverse=True)
        if not 2 <= len(names) <= max(2, len(label) // 10):
            raise DataError(
                f"{table.where}: {len(names)} different targets on {len(label)} rows are not classes\n"
                "  use ridge-cv for a numeric target"
            )
        classes = torch.from_numpy(label.astype(np.int64))
        features, rows = split(table, self.shares, Key(seed).fold("logistic-cv"))
        parts = [
            {"a": torch.cat([a, a.new_ones(len(a), 1)], dim=1).to(device, dtype), "label": classes[part].to(device)}
            for a, part in zip(features, rows, strict=True)
        ]
        return parts, len(names)

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> LogisticClosedForm:
        """The solved lower level of ``problem`` with the same arguments (``dtype`` float64 unless rough values will do)."""
        (train, validation, _), classes = self._rows(seed, device, dtype)
        return LogisticClosedForm(train, validation, 1 if classes == 2 else classes)

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        parts, classes = self._rows(seed, device, dtype)
        train, validation, test = parts
        vectors = 1 if classes == 2 else classes
        exact = LogisticClosedForm({**train, "a": train["a"].double()}, {**validation, "a": validation["a"].double()}, vectors)

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            try:
                solution, value, stationarity = exact.exactly({"log_penalty": theta["log_penalty"].double()})
                solved = [value, stationarity, torch.linalg.vector_norm(x["x"] - solution["x"])]
            except NumericalError:
                solved = [torch.full((), math.nan, device=device)] * 3
            right = scores(x, test["a"]).argmax(-1) == test["label"]
            numbers = [*solved, fit(x, validation), fit(x, test), right.double().mean()]
            return dict(zip(self.metrics, torch.stack([number.double() for number in numbers]).tolist(), strict=True))

        x0 = torch.zeros(vectors, train["a"].shape[1], dtype=dtype, device=device)
        return problem_of(lambda x, batch: scores(x, batch["a"]), criterion, parts, x0, self.bound, evaluate)
