"""Predict the best mixture from mixtures and their validation losses."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.packages import optional_module
from hgms_core import Key

Regressor = Literal["linear", "quadratic", "boosting"]

RIDGES = tuple(10.0**power for power in range(-8, 3))
"""Candidate penalties of ridge regression, selected by leave-one-out error."""


def sklearn() -> Any:
    """Import scikit-learn on first use."""
    for part in ("ensemble", "linear_model", "pipeline", "preprocessing"):
        optional_module(f"sklearn.{part}", "method 'regmix'", "sklearn", place=("method",))
    return optional_module("sklearn", "method 'regmix'", "sklearn")


@frozen(kw_only=True)
class Mixtures:
    """Random points of the simplex, from Dirichlet(c·S·prior) with log c uniform between log low
    and log high.

    ``prior`` is their mean. A small c gives mixtures of one or two sources, a large c mixtures near
    the prior.

    Examples
    --------
    >>> draw = Mixtures(prior=(0.5, 0.25, 0.25), low=0.1, high=5.0).draw(Key(0), 4)
    >>> draw.shape, bool(torch.allclose(draw.sum(1), torch.ones(4, dtype=torch.float64)))
    (torch.Size([4, 3]), True)
    """

    prior: tuple[float, ...]
    low: float
    high: float

    def draw(self, key: Key, count: int) -> Tensor:
        generator = np.random.default_rng(key.derive())
        strength = np.exp(generator.uniform(np.log(self.low), np.log(self.high), size=(count, 1)))
        gamma = generator.standard_gamma(strength * len(self.prior) * np.array(self.prior))
        # If all values of a row underflow, the row is the first source only.
        gamma[:, 0] += np.where(gamma.sum(1) > 0, 0.0, 1.0)
        return torch.from_numpy(gamma / gamma.sum(1, keepdims=True))


@frozen(kw_only=True)
class Fit:
    """Predict the validation loss of mixtures.

    ``error`` is the root mean square of the residuals on the runs.
    """

    predict: Any
    error: float


def fit(mixtures: Tensor, losses: Tensor, regressor: Regressor, seed: int) -> Fit:
    """Fit a regression of ``losses`` on ``mixtures``, ``[R, S]``.

    ``linear`` is a ridge regression on the weights, ``quadratic`` on the weights and their
    products. The penalty has the lowest leave-one-out error. ``boosting`` is gradient boosting of
    small trees.
    """
    library = sklearn()
    if regressor == "boosting":
        model = library.ensemble.GradientBoostingRegressor(
            n_estimators=300,
            max_depth=3,
            learning_rate=0.05,
            subsample=0.8,
            random_state=seed % 2**32,
        )
    else:
        steps: list[Any] = [
            library.preprocessing.StandardScaler(),
            library.linear_model.RidgeCV(alphas=RIDGES),
        ]
        if regressor == "quadratic":
            steps.insert(0, library.preprocessing.PolynomialFeatures(degree=2, include_bias=False))
        model = library.pipeline.make_pipeline(*steps)

    model.fit(mixtures.numpy(), losses.numpy())

    def predict(weights: Tensor) -> Tensor:
        return torch.from_numpy(model.predict(weights.numpy()))

    error = float((predict(mixtures) - losses).square().mean().sqrt())
    return Fit(predict=predict, error=error)


def best(fitted: Fit, mixtures: Tensor, top: int) -> tuple[Tensor, float]:
    """Return the mean of the ``top`` mixtures with the lowest predicted losses, and its
    predicted loss.
    """
    order = torch.argsort(fitted.predict(mixtures), stable=True)[:top]
    mean = mixtures[order].mean(0)
    return mean, float(fitted.predict(mean[None]))
