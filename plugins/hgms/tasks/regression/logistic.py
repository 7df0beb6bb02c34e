"""Logistic regression with one penalty per feature, or per class, on a real table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, final

import numpy as np
import torch
from attrs import field
from torch import Tensor

from hgms.tasks.regression.newton import LogisticClosedForm, criterion, fit, scores
from hgms.tasks.regression.tables import (
    METRICS,
    TRAITS,
    contents,
    load_table,
    problem_of,
    split,
    split_shares,
    standardise_parts,
    table_name,
)
from hgms_core import Key, NumericalError, Problem, Tree, component
from hgms_core.capabilities import Capabilities, HasClosedForm, HasData
from hgms_core.errors import DataError
from hgms_core.validators import optional, positive


@final
@component
class LogisticCv:
    """Logistic regression on a real table: one log-penalty per feature, chosen on validation rows.

    With CE the cross-entropy of the softmax of the scores x_cᵀa (of 0 and xᵀa for two classes)::

        g(θ, x) = (1/n) Σ_i CE(x a_i, c_i) + ½ Σ_j e^{θ_j} Σ_c x_{cj}²,
            f(x) = (1/m) Σ_i CE(x a'_i, c'_i)

    With ``penalties = "classes"``, every vector of coefficients has one penalty instead: ½ Σ_c
    e^{θ_c} ‖x_c‖². Features are standardised with the means and standard deviations of the training
    rows. The intercept is the coefficient of a last feature that is 1. It has a penalty like the
    others, so that g is strongly convex. Θ = [−bound, bound]^p, by projection.

    Use when methods must be compared on real data with the exact F, and a lower level that is not
    quadratic. Avoid for tables of more than a few thousand coefficients: ``evaluate`` factors their
    Hessian about ten times.

    Parameters
    ----------
    dataset
        ``sklearn:breast-cancer`` (or any of scikit-learn's embedded tables) or ``libsvm:FILE``; the
        distinct targets are the classes.
    validation
        Another table for the validation rows; all rows of ``dataset`` are then training rows
        (``shares`` has no effect), there are no test rows, and the test metrics are NaN.
    shares
        Of the rows for training, validation and test, drawn from the seed.
    bound
        See Θ.
    standardise, intercept
        Whether features are scaled and a constant feature is added.
    penalties
        One for each of the ``features``, or of the ``classes``.
    theta0
        Every entry of θ0.
    start
        ``zeros`` (x0 = 0, θ0 = ``theta0``) or ``random``: x0 ~ N(0, I), θ0 = ``theta0`` + log U(0,
        1).
    exact
        False sets value_function, stationarity and lower_distance to NaN; use it if solving for
        them takes too long.

    Raises
    ------
    DataError
        (a file that is missing or damaged, missing values, a target with one value only or with
        more than a tenth as many as there are rows, validation rows that do not fit).
    MissingExtra
        (scikit-learn or datasets). If the lower level cannot be solved to tolerance, the three
        metrics that need it are NaN.

    Notes
    -----
    Source: standard; the regularisation-selection problem of Pedregosa (2016) and of the field's
    benchmark (Dagréou et al. 2022), whose settings are in the README.

    Examples
    --------
    >>> task, cpu, double = LogisticCv(dataset="sklearn:iris"), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> numbers = problem.evaluate(problem.theta0, exact.solution(problem.theta0))
    >>> numbers["lower_distance"], numbers["upper_loss"] == numbers["value_function"]
    (0.0, True)
    """

    name: ClassVar[str] = "logistic-cv"
    capabilities: ClassVar[Capabilities] = frozenset({HasClosedForm, HasData})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = TRAITS
    metric_rows: ClassVar[Mapping[str, str]] = {"upper_loss": "validation"}
    metrics: ClassVar[Mapping[str, bool]] = METRICS | {"test_accuracy": True}

    dataset: str = field(default="sklearn:breast-cancer", validator=table_name)
    validation: str | None = field(default=None, validator=optional(table_name))
    shares: tuple[float, float, float] = field(default=(0.5, 0.25, 0.25), validator=split_shares)
    standardise: bool = True
    intercept: bool = True
    penalties: Literal["features", "classes"] = "features"
    start: Literal["zeros", "random"] = "zeros"
    theta0: float = 0.0
    bound: float = field(default=10.0, validator=positive)
    exact: bool = True

    def data_fingerprint(self) -> dict[str, list[str]]:
        """The checksums of the files of the tables."""
        return contents(self.dataset, self.validation)

    def _rows(self, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[list[Tree], int]:
        """Return (train, validation and test, the number of vectors of coefficients)."""
        table = load_table(self.dataset)
        names, label = np.unique(table.target, return_inverse=True)
        if not 2 <= len(names) <= max(2, len(label) // 10):
            raise DataError(
                "wrong-value",
                f"the target has {len(names)} different values in {len(label)} rows, so they are "
                "not classes",
                place=(table.where,),
                hint="use ridge-cv for a numeric target",
            )
        features = torch.from_numpy(table.features)
        labels = torch.from_numpy(label.astype(np.int64))
        if self.validation is None:
            rows = split(table, self.shares, Key(seed).fold("logistic-cv"))
            parts = [(features[part], labels[part]) for part in rows]
        else:
            other = load_table(self.validation, features.shape[1])
            unknown = np.setdiff1d(other.target, names)
            if len(unknown):
                raise DataError(
                    "wrong-value",
                    f"the classes {', '.join(map(str, unknown))} are not in {table.where}",
                    place=(other.where,),
                )
            known = torch.from_numpy(np.searchsorted(names, other.target))
            parts = [(features, labels), (torch.from_numpy(other.features), known)]
        columns = [a for a, _ in parts]
        columns = standardise_parts(columns) if self.standardise else columns
        columns = (
            [torch.cat([a, a.new_ones(len(a), 1)], dim=1) for a in columns]
            if self.intercept
            else columns
        )
        named = [
            {"a": a.to(device, dtype), "label": c.to(device)}
            for a, (_, c) in zip(columns, parts, strict=True)
        ]
        return named, 1 if len(names) == 2 else len(names)

    def closed_form(
        self, seed: int, device: torch.device, dtype: torch.dtype
    ) -> LogisticClosedForm:
        """Return the solved lower level of ``problem`` with the same arguments.

        Use float64 for ``dtype`` unless rough values are sufficient.
        """
        (train, validation, *_), vectors = self._rows(seed, device, dtype)
        return LogisticClosedForm(train, validation, vectors)

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        parts, vectors = self._rows(seed, device, dtype)
        train, validation, *test = parts
        exact = LogisticClosedForm(
            {**train, "a": train["a"].double()},
            {**validation, "a": validation["a"].double()},
            vectors,
        )
        nothing = torch.full((), math.nan, dtype=torch.float64, device=device)

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            solved = [nothing] * 3
            tested = [nothing] * 2
            if self.exact:
                try:
                    solution, value, slope = exact.exactly(
                        {"log_penalty": theta["log_penalty"].double()}
                    )
                    solved = [
                        value,
                        *map(
                            torch.linalg.vector_norm, (slope["log_penalty"], x["x"] - solution["x"])
                        ),
                    ]
                except NumericalError:
                    pass
            for rows in test:
                right = scores(x, rows["a"]).argmax(-1) == rows["label"]
                tested = [fit(x, rows), right.double().mean()]
            numbers = [*solved, fit(x, validation), *tested]
            return dict(
                zip(
                    self.metrics,
                    torch.stack([number.double() for number in numbers]).tolist(),
                    strict=True,
                )
            )

        theta0, x0 = self._start(vectors, train["a"].shape[1], Key(seed).fold("logistic-cv.start"))
        return problem_of(
            lambda x, batch: scores(x, batch["a"]),
            criterion,
            parts,
            theta0.to(device, dtype),
            x0.to(device, dtype),
            self.bound,
            evaluate,
        )

    def _start(self, vectors: int, features: int, key: Key) -> tuple[Tensor, Tensor]:
        """(θ0, x0), the same numbers in every precision."""
        shape = (features,) if self.penalties == "features" else (vectors, 1)
        theta0 = torch.full(shape, self.theta0, dtype=torch.float64)
        x0 = torch.zeros(vectors, features, dtype=torch.float64)
        if self.start == "random":
            generator = key.generator()
            x0 = torch.randn(x0.shape, generator=generator, dtype=torch.float64)
            theta0 = theta0 + torch.rand(shape, generator=generator, dtype=torch.float64).log()
        return theta0, x0
