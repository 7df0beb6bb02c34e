"""The conformance checks, and the lower level and its hypergradient against scikit-learn's own
solvers.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hgms_feature_penalties import FeaturePenalties
from hgms_feature_penalties.tables import load, with_noise
from hgms_feature_penalties.task import loss, score, separation
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import roc_auc_score

from hgms.adapters import hypergradient
from hgms.testing import parametrize_with_checks
from hgms_core import ConfigError, Key, Problem, Tree
from hgms_core.errors import MissingExtra

CPU = torch.device("cpu")
F64 = torch.float64
SMALL = {"noise_features": 5}
TASKS = {
    name: FeaturePenalties(dataset=name, **SMALL) for name in ("breast-cancer", "wine", "diabetes")
}  # type: ignore[arg-type]
CLASSES = {"breast-cancer": 2, "wine": 3, "diabetes": 0}


def built(task: FeaturePenalties, seed: int = 0) -> Problem:
    return task.problem(seed, CPU, F64)


def penalties(problem: Problem, seed: int = 1) -> Tree:
    """Some θ in Θ with a separate value for every feature."""
    draw = Key(seed).fold("penalties").generator()
    return problem.project(
        {
            name: leaf + torch.randn(leaf.shape, generator=draw, dtype=F64)
            for name, leaf in problem.theta0.items()
        }
    )


def solved(problem: Problem, theta: Tree, classes: int) -> Tree:
    """The lower minimiser as scikit-learn finds it: features divided by √(n e^θ) have the
    penalty ½‖z‖² for the summed loss.
    """
    rows = problem.lower_data.whole
    scale = (len(rows["y"]) * theta["log_penalty"].exp()).sqrt()
    a = (rows["a"] / scale).numpy()
    y = rows["y"].numpy()
    if not classes:
        ridge = Ridge(alpha=1.0, solver="cholesky").fit(a, y)
        return {
            "weight": torch.from_numpy(ridge.coef_)[None] / scale,
            "intercept": torch.tensor([ridge.intercept_], dtype=F64),
        }
    model = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-12, max_iter=200).fit(a, y)
    intercept = torch.from_numpy(model.intercept_)
    # ours has no intercept for the first class
    return {
        "weight": torch.from_numpy(model.coef_) / scale,
        "intercept": intercept if classes == 2 else (intercept - intercept[0])[1:],
    }


@parametrize_with_checks(
    [
        TASKS["breast-cancer"],
        TASKS["diabetes"],
        FeaturePenalties(dataset="wine", noise="gaussian", noise_features=20),
    ]
)
def test_conformance(component, check):
    check(component)


@pytest.mark.parametrize("name", TASKS)
def test_the_lower_optimum_is_scikit_learns(name):
    problem = built(TASKS[name])
    theta = penalties(problem)
    x = solved(problem, theta, CLASSES[name])
    assert {key: leaf.shape for key, leaf in x.items()} == {
        key: leaf.shape for key, leaf in problem.x0.items()
    }
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in x.items()}
    slopes = torch.autograd.grad(
        problem.g(theta, leaves, problem.lower_data.whole), list(leaves.values())
    )
    assert max(float(slope.abs().max()) for slope in slopes) < 1e-9


@pytest.mark.parametrize("name", TASKS)
def test_the_hypergradient_is_the_slope_of_what_scikit_learn_solves(name):
    problem = built(TASKS[name])
    classes = CLASSES[name]
    theta = penalties(problem)
    lower = problem.lower_data.whole
    upper = problem.upper_data["differentiate"].whole

    def dense(matvec, b):
        return torch.linalg.solve(
            torch.stack([matvec(row) for row in torch.eye(len(b), dtype=F64)]), b
        )

    estimate = hypergradient(
        lambda t, x: problem.f(t, x, upper),
        lambda t, x: problem.g(t, x, lower),
        theta,
        solved(problem, theta, classes),
        solver=dense,
    ).value["log_penalty"]

    def value(j, shift):
        moved = theta["log_penalty"].clone()
        moved[j] += shift
        return float(problem.f(theta, solved(problem, {"log_penalty": moved}, classes), upper))

    features = [0, 3, len(estimate) - 1]
    differences = [(value(j, 1e-3) - value(j, -1e-3)) / 2e-3 for j in features]
    torch.testing.assert_close(
        estimate[features], torch.tensor(differences, dtype=F64), rtol=1e-4, atol=1e-8
    )


@pytest.mark.parametrize("name", TASKS)
def test_the_score_is_scikit_learns(name):
    problem = built(TASKS[name])
    classes = CLASSES[name]
    x = solved(problem, problem.theta0, classes)
    test = problem.upper_data["stop"].whole
    rows = problem.lower_data.whole
    scale = (len(rows["y"]) * problem.theta0["log_penalty"].exp()).sqrt()
    model = (
        Ridge(alpha=1.0)
        if not classes
        else LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-12)
    )
    model.fit((rows["a"] / scale).numpy(), rows["y"].numpy())
    assert float(score(x, test, classes)) == pytest.approx(
        model.score((test["a"] / scale).numpy(), test["y"].numpy()), abs=1e-9
    )


def test_the_separation_is_the_area_under_the_roc_curve():
    learned = torch.tensor([0.3, -1.0, 2.0, 0.5, 0.3, 2.5, 0.5, 0.5], dtype=F64)
    assert float(separation(learned, noise=3)) == pytest.approx(
        roc_auc_score([0] * 5 + [1] * 3, learned.numpy())
    )


@pytest.mark.parametrize("kind", ["permuted", "gaussian"])
def test_noise_comes_last_and_the_table_stays(kind):
    table = load("wine")
    noisy = with_noise(table, 20, kind, Key(0))
    torch.testing.assert_close(noisy.features[:, :13], table.features, rtol=0, atol=0)
    assert (noisy.noise, noisy.features.shape) == (20, (178, 33))
    sums = {round(float(column), 6) for column in table.features.sort(0).values.cumsum(0).sum(0)}
    copies = [
        round(float(column), 6) in sums
        for column in noisy.features[:, 13:].sort(0).values.cumsum(0).sum(0)
    ]
    assert copies == [kind == "permuted"] * 20
    # no column of noise follows the classes: |t| of the most correlated of 20 is about 2, of a
    # feature of wine up to 18
    centred = noisy.features - noisy.features.mean(0)
    classes = table.target.to(F64) - table.target.to(F64).mean()
    correlation = (centred.T @ classes / centred.norm(dim=0) / classes.norm()).abs()
    assert correlation[13:].max() < 0.3 < correlation[:13].max()


def test_the_rows_are_standardised_on_the_training_rows_alone():
    problem = built(FeaturePenalties(dataset="digits"))
    a = problem.lower_data.whole["a"]
    assert a.shape == (449, 91)
    spread = a.std(0, correction=0)
    torch.testing.assert_close(a.mean(0), torch.zeros(91, dtype=F64), rtol=0, atol=1e-12)
    assert ((spread - 1).abs() < 1e-12).sum() + (spread < 1e-12).sum() == 91
    assert problem.upper_data["differentiate"].whole["a"].mean(0).abs().max() > 1e-3


def test_knowing_the_noise_lowers_the_test_loss():
    gains = []
    for seed in range(5):
        task = FeaturePenalties()
        problem = built(task, seed)
        clean = problem.references["clean"]
        gains.append(
            problem.evaluate(problem.theta0, solved(problem, problem.theta0, 2))["test_loss"]
            - problem.evaluate(clean, solved(problem, clean, 2))["test_loss"]
        )
    assert min(gains) > 0


def test_the_reference_is_in_the_feasible_set_and_separates():
    problem = built(FeaturePenalties())
    clean = problem.references["clean"]
    torch.testing.assert_close(problem.project(clean), clean)
    numbers = problem.evaluate(clean, problem.x0)
    assert numbers["noise_auc"] == 1.0
    assert numbers["test_loss"] == pytest.approx(float(torch.tensor(2.0).log()))
    assert problem.evaluate(problem.theta0, problem.x0)["noise_auc"] == 0.5


def test_a_loss_is_the_mean_of_its_rows():
    for name, task in TASKS.items():
        problem = built(task)
        theta = penalties(problem)
        data = problem.lower_data
        x = solved(problem, theta, CLASSES[name])
        losses = [loss(x, data.batch(torch.tensor([i])), CLASSES[name]) for i in range(data.size)]
        torch.testing.assert_close(loss(x, data.whole, CLASSES[name]), torch.stack(losses).mean())


@pytest.mark.parametrize(
    "settings",
    [{"penalty": 20.0}, {"shares": (0.5, 0.5, 0.5)}, {"noise_features": 901}, {"dataset": "iris"}],
)
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(ConfigError) as caught:
        FeaturePenalties(**settings)
    assert caught.value.place == tuple(settings)


def test_a_missing_scikit_learn_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra) as caught:
        built(TASKS["wine"])
    assert caught.value.install == "pip install scikit-learn"
