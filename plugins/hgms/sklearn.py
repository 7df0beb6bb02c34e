"""Linear models of scikit-learn with one learned penalty per feature or group of features.

::

    coefficients = argmin_w  mean_i ℓ(x_iᵀw + b, y_i) + ½ Σ_j λ_g(j) w_j²

:func:`hgms.tune` learns λ by implicit hypergradients of nested cross-validation losses, and keeps
one shared penalty unless separate penalties are better by more than a standard error. Features are
standardised first, so that a shared penalty treats them alike.

Requires scikit-learn: ``pip install 'hgms[sklearn]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hgms.hyper import PerInput
from hgms.tuning import TuneResult, tune

__all__ = ["TunedClassifier", "TunedRegressor"]

FEW_ROWS = 12
"""With fewer rows there are three folds, the smallest number."""
LEAST_ROWS = 9
"""With fewer rows, a nested cross-validation has folds of one row: the penalty stays at its start.
"""


class _Tuned(BaseEstimator):
    """What both estimators share: standardised features, and a tuned linear layer."""

    def __init__(
        self,
        *,
        groups: Sequence[int] | None = None,
        penalty: float = 0.01,
        budget: str = "300 steps",
        random_state: int = 0,
    ) -> None:
        self.groups = groups
        self.penalty = penalty
        self.budget = budget
        self.random_state = random_state

    def _fit_linear(
        self, features: Any, targets: Tensor, outputs: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Any, Any]:
        """Return the coefficients ``[outputs, features]`` and intercepts for raw features."""
        mean = features.mean(0)
        scale = features.std(0)
        scale[scale == 0] = 1.0
        rows = {"x": torch.from_numpy((features - mean) / scale), "y": targets}
        model = nn.Linear(features.shape[1], outputs, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)

        def row_losses(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
            return loss(model(batch["x"]), batch["y"])

        groups = None if self.groups is None else tuple(int(group) for group in self.groups)
        count = len(features)
        result = tune(
            model,
            row_losses,
            rows,
            learn={"penalty": PerInput(init=self.penalty, groups=groups)},
            budget=self.budget if count >= LEAST_ROWS else "1 steps",
            engine="implicit",
            folds=3 if count < FEW_ROWS else None,
            seed=self.random_state,
        )
        self.result_: TuneResult = result
        self.penalties_ = result.values["penalty"].numpy()
        with torch.no_grad():
            layer: Any = result.model
            weight = layer.weight.numpy() / scale
            bias = layer.bias.numpy() - weight @ mean
        return weight, bias


class TunedRegressor(RegressorMixin, _Tuned):
    """Ridge regression with one learned penalty per feature or group.

    Parameters
    ----------
    groups
        The group of each feature, numbered from 0; by default one penalty per feature.
    penalty
        The penalty at the start.
    budget
        Newton steps (``"300 steps"``), or seconds (``"5s"``), as for :func:`hgms.tune`.
    random_state
        Seed of the folds.

    Attributes
    ----------
    coef_, intercept_
        The linear model of the raw features.
    penalties_
        The learned penalties of the standardised features.
    result_
        The :class:`hgms.TuneResult`, with the baselines.

    Examples
    --------
    >>> draw = np.random.default_rng(0)
    >>> x = draw.normal(size=(60, 8))
    >>> y = 3 * x[:, 0] + draw.normal(size=60)
    >>> model = TunedRegressor(budget="60 steps").fit(x, y)
    >>> int(np.argmin(model.penalties_)), model.predict(x[:2]).shape
    (0, (2,))
    """

    def fit(self, X: Any, y: Any) -> Self:
        features, target = validate_data(
            self, X, y, y_numeric=True, dtype=np.float64, ensure_min_samples=3
        )
        target = target.astype(np.float64)
        mean = target.mean()
        scale = target.std() or 1.0
        rows = torch.from_numpy((target - mean) / scale)
        weight, bias = self._fit_linear(
            features, rows, 1, lambda output, y: (output.squeeze(1) - y).square()
        )
        self.coef_ = weight[0] * scale
        self.intercept_ = float(bias[0] * scale + mean)
        return self

    def predict(self, X: Any) -> Any:
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float64, reset=False)
        return features @ self.coef_ + self.intercept_


class TunedClassifier(ClassifierMixin, _Tuned):
    """Logistic regression with one learned penalty per feature or group.

    Two classes have one output; more classes are a softmax with the same penalties in all outputs.
    Parameters and attributes are those of :class:`TunedRegressor`, and ``classes_``.

    Examples
    --------
    >>> draw = np.random.default_rng(0)
    >>> x = draw.normal(size=(60, 8))
    >>> y = np.where(x[:, 0] + 0.3 * draw.normal(size=60) > 0, "yes", "no")
    >>> model = TunedClassifier(budget="60 steps").fit(x, y)
    >>> model.classes_.tolist(), model.score(x, y) > 0.8
    (['no', 'yes'], True)
    """

    def fit(self, X: Any, y: Any) -> Self:
        features, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=3)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} requires 2 classes, but the data contain one class: "
                f"{self.classes_[0]!r}"
            )
        if len(self.classes_) == 2:
            weight, bias = self._fit_linear(
                features, torch.from_numpy(codes.astype(np.float64)), 1, _binary
            )
        else:
            outputs = len(self.classes_)
            weight, bias = self._fit_linear(
                features, torch.from_numpy(codes.astype(np.int64)), outputs, _several
            )
        self.coef_ = weight
        self.intercept_ = bias
        return self

    def decision_function(self, X: Any) -> Any:
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float64, reset=False)
        scores = features @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> Any:
        scores = torch.from_numpy(np.asarray(self.decision_function(X)))
        if len(self.classes_) == 2:
            share = scores.sigmoid()
            return torch.stack([1 - share, share], 1).numpy()
        return scores.softmax(1).numpy()

    def predict(self, X: Any) -> Any:
        scores = self.decision_function(X)
        codes = (scores > 0).astype(int) if len(self.classes_) == 2 else scores.argmax(1)
        return self.classes_[codes]


def _binary(output: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(output.squeeze(1), y, reduction="none")


def _several(output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output, y, reduction="none")
