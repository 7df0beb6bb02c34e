"""Ridge regression on a real table, one penalty per feature, with an exact hypergradient.

Value and hypergradient take one dense solve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import numpy as np
import torch
from attrs import field
from torch import Tensor

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
from hgms.tasks.ridge_closed_form import RidgeClosedForm, squared_loss
from hgms_core import Key, Problem, Tree, component
from hgms_core.capabilities import Capabilities, HasClosedForm, HasData
from hgms_core.errors import DataError
from hgms_core.validators import positive


def _predictions(x: Tree, batch: Tree) -> Tensor:
    return batch["a"] @ x["x"]


def _half_square(predictions: Tensor, batch: Tree) -> Tensor:
    return 0.5 * (predictions - batch["b"]).square().mean()


@final
@component
class RidgeCv:
    """Ridge regression on a real table: one log-penalty per feature, chosen on validation rows.

    ::

        g(θ, x) = (1/2n) Σ_i (a_iᵀx − b_i)² + ½ Σ_j e^{θ_j} x_j²,
            f(x) = (1/2m) Σ_i (a'_iᵀx − b'_i)²,  θ0 = 0

    Features and target are standardised with the means and standard deviations of the training
    rows. No intercept is needed, and losses are in units of the target's variance. Θ = [−bound,
    bound]^d, by projection. x*(θ), F(θ) and ∇F(θ) come from :meth:`closed_form`.

    Use when methods must be compared on real data against exact values. Avoid for studying the
    effect of selection: the lower minimiser is unique.

    Parameters
    ----------
    dataset
        ``sklearn:diabetes`` (or any of scikit-learn's embedded tables) or ``libsvm:FILE``; the
        target is read as a number.
    shares
        Of the rows for training, validation and test, drawn from the seed.
    bound
        See Θ.

    Raises
    ------
    DataError
        (a file that is missing or damaged, a table with missing values or a target that is not a
        number).
    MissingExtra
        (scikit-learn or datasets).

    Notes
    -----
    Cost of ``evaluate``: three d × d solves.

    Source: standard; Bengio (2000), Pedregosa (2016).

    Examples
    --------
    >>> task, cpu, double = RidgeCv(), torch.device("cpu"), torch.float64
    >>> problem, exact = task.problem(0, cpu, double), task.closed_form(0, cpu, double)
    >>> round(
    ...     problem.evaluate(problem.theta0, exact.solution(problem.theta0))["lower_distance"], 12
    ... )
    0.0
    """

    name: ClassVar[str] = "ridge-cv"
    capabilities: ClassVar[Capabilities] = frozenset({HasClosedForm, HasData})
    version: ClassVar[str] = "1"
    traits: ClassVar[frozenset[str]] = TRAITS
    metric_rows: ClassVar[Mapping[str, str]] = {"upper_loss": "validation"}
    metrics: ClassVar[Mapping[str, bool]] = METRICS | {"test_r2": True}

    dataset: str = field(default="sklearn:diabetes", validator=table_name)
    shares: tuple[float, float, float] = field(default=(0.5, 0.25, 0.25), validator=split_shares)
    bound: float = field(default=10.0, validator=positive)

    def data_fingerprint(self) -> dict[str, list[str]]:
        """The checksums of the files of the table."""
        return contents(self.dataset)

    def _rows(self, seed: int, device: torch.device, dtype: torch.dtype) -> list[Tree]:
        """Return train, validation and test rows, standardised in float64.

        Every device and precision has the same rows.
        """
        table = load_table(self.dataset)
        try:
            target = torch.from_numpy(np.asarray(table.target, np.float64))
        except (TypeError, ValueError) as error:
            raise DataError(
                "wrong-type",
                f"the target is not a number: {error}",
                place=(table.where,),
                hint="use logistic-cv for classes",
            ) from error
        rows = split(table, self.shares, Key(seed).fold("ridge-cv"))
        features = standardise_parts([torch.from_numpy(table.features)[part] for part in rows])
        mean = target[rows[0]].mean()
        spread = target[rows[0]].std(correction=0)
        if not spread > 0:
            raise DataError(
                "wrong-value",
                f"the target is {float(mean):g} in all training rows, but must vary",
                place=(table.where,),
                hint="choose another table",
            )
        return [
            {"a": a.to(device, dtype), "b": ((target[part] - mean) / spread).to(device, dtype)}
            for a, part in zip(features, rows, strict=True)
        ]

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> RidgeClosedForm:
        """The exact solution, value and hypergradient of ``problem`` with the same arguments."""
        train, validation, _ = self._rows(seed, device, dtype)
        return RidgeClosedForm(train["a"], train["b"], validation["a"], validation["b"])

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem:
        parts = train, validation, test = self._rows(seed, device, dtype)
        # Metrics are exact: computed in float64 in every precision of the run.
        exact = RidgeClosedForm(
            *(leaf.double() for leaf in (train["a"], train["b"], validation["a"], validation["b"]))
        )

        @torch.no_grad()
        def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
            wide = {"log_penalty": theta["log_penalty"].double()}
            fit = squared_loss(x, test)
            stationarity = torch.linalg.vector_norm(exact.hypergradient(wide)["log_penalty"])
            gap = torch.linalg.vector_norm(x["x"] - exact.solution(wide)["x"])
            r2 = 1 - 2 * fit / test["b"].var(correction=0)
            numbers = [exact.value(wide), stationarity, gap, squared_loss(x, validation), fit, r2]
            return dict(
                zip(
                    self.metrics,
                    torch.stack([number.double() for number in numbers]).tolist(),
                    strict=True,
                )
            )

        zeros = torch.zeros_like(train["a"][0])
        return problem_of(_predictions, _half_square, parts, zeros, zeros, self.bound, evaluate)
