"""Predict the best mixture from mixtures and their validation losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
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


def draw_mixtures(
    key: Key, count: int, prior: Sequence[float], concentration: tuple[float, float]
) -> Tensor:
    """Return random points of the simplex, ``[count, S]``, with the mean ``prior``.

    They are from Dirichlet(c·S·prior) with log c uniform in the range ``concentration``. A small c
    gives mixtures of one or two sources, a large c mixtures near the prior.

    Examples
    --------
    >>> draw = draw_mixtures(Key(0), 4, (0.5, 0.25, 0.25), (0.1, 5.0))
    >>> draw.shape, bool(torch.allclose(draw.sum(1), torch.ones(4, dtype=torch.float64)))
    (torch.Size([4, 3]), True)
    """
    generator = np.random.default_rng(key.derive())
    low, high = np.log(concentration)
    strength = np.exp(generator.uniform(low, high, size=(count, 1)))
    gamma = generator.standard_gamma(strength * len(prior) * np.array(prior))
    # If all values of a row underflow, the row is the first source only.
    gamma[:, 0] += np.where(gamma.sum(1) > 0, 0.0, 1.0)
    return torch.from_numpy(gamma / gamma.sum(1, keepdims=True))


def fit(
    mixtures: Tensor, losses: Tensor, regressor: Regressor, seed: int
) -> Callable[[Tensor], Tensor]:
    """Return the fit of ``losses`` on ``mixtures``, ``[R, S]``: a function of mixtures.

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
    return lambda weights: torch.from_numpy(model.predict(weights.numpy()))


def best(predict: Callable[[Tensor], Tensor], mixtures: Tensor, top: int) -> tuple[Tensor, float]:
    """Return the mean of the ``top`` mixtures with the lowest predicted losses, and its
    predicted loss.
    """
    mean = mixtures[torch.argsort(predict(mixtures), stable=True)[:top]].mean(0)
    return mean, float(predict(mean[None]))
