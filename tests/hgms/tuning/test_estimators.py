"""The estimators of ``hgms.sklearn``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hgms.sklearn import TunedClassifier, TunedRegressor


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [TunedRegressor, TunedClassifier])
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn_pass(kind: Any) -> None:
    from sklearn.utils.estimator_checks import check_estimator

    results = check_estimator(kind(budget="20 steps"), on_fail=None)
    assert len(results) > 40
    failed = [row["check_name"] for row in results if row["status"] == "failed"]
    assert failed == []


def test_the_regressor_is_ridge_regression_with_its_penalties() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 30)) * np.linspace(1, 6, 30) + 7
    y = 2 * x[:, 0] - x[:, 1] + draw.normal(size=60)
    groups = [0, 0, *[1] * 28]
    model = TunedRegressor(groups=groups, budget="120 steps").fit(x, y)
    assert model.penalties_.shape == (2,)
    assert model.penalties_[0] < model.penalties_[1]
    scaled = (x - x.mean(0)) / x.std(0)
    target = (y - y.mean()) / y.std()
    decay = np.diag(model.penalties_[groups])
    exact = np.linalg.solve(2 * scaled.T @ scaled / 60 + decay, 2 * scaled.T @ target / 60)
    np.testing.assert_allclose(model.coef_, exact / x.std(0) * y.std(), rtol=1e-3, atol=1e-4)
    assert model.score(x, y) > 0.8


def test_a_classifier_of_three_classes_returns_probabilities() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 3))
    y = np.array(["a", "b", "c"])[np.argmax(x, axis=1)]
    model = TunedClassifier(budget="40 steps").fit(x, y)
    shares = model.predict_proba(x)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert (model.classes_[shares.argmax(1)] == model.predict(x)).all()
    assert model.score(x, y) > 0.85
