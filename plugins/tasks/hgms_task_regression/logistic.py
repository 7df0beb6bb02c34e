"""Logistic regression with one penalty per feature on a real table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import numpy as np
import torch
from attrs import field, frozen

from hgms_core import DataError, Key, NumericalError, Problem, Tree
from hgms_fields import positive
from hgms_task_regression.newton import LogisticClosedForm, fit, scores
from hgms_task_regression.tables import METRICS, TRAITS, load_table, problem_of, split, split_shares, table_name


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
    shares: tuple[float, float, float] = field(default=(0.5, 0.25, 0.25), converter=tuple, validator=split_shares)
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
        return problem_of(fit, parts, x0, self.bound, evaluate)
