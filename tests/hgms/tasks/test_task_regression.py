"""Ridge and logistic regression on real tables: against scikit-learn, and the data. Derivatives:
test_closed_forms.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import LogisticRegression, Ridge
from support.helpers import F64, normal, rejects

import hgms_core
from hgms.tasks.regression import LogisticCv, RidgeCv, load_table
from hgms.tasks.regression.tables import Table
from hgms_core import ConfigError, NumericalError, Problem, Tree
from hgms_core.errors import DataError

CPU = torch.device("cpu")


def built(task: RidgeCv | LogisticCv, seed: int = 0) -> tuple[Problem, Any, Tree]:
    """Of the task: its problem, the closed form, and a θ to look at them at."""
    problem = task.problem(seed, CPU, F64)
    first = problem.theta0["log_penalty"]
    theta = torch.linspace(-4, 0.5, first.numel(), dtype=F64).reshape(first.shape)
    return problem, task.closed_form(seed, CPU, F64), {"log_penalty": theta}


def test_parts_are_disjoint_and_standardised_with_the_training_rows(tmp_path: Path) -> None:
    features = np.column_stack([np.arange(40.0), np.full(40, 0.1), np.arange(40.0) ** 2])
    dump_svmlight_file(features, np.arange(40.0), str(tmp_path / "numbered"))
    task = RidgeCv(dataset=f"libsvm:{tmp_path / 'numbered'}", shares=(0.5, 0.3, 0.2))
    problem, exact, _ = built(task)
    train, above = problem.lower_data.whole, problem.upper_data["select"].whole
    table = torch.column_stack([train["a"], train["b"]])
    assert torch.allclose(table.mean(0), torch.zeros(4, dtype=F64), atol=1e-12)
    # the second one is constant
    assert table.std(0, correction=0).tolist() == pytest.approx([1, 0, 1, 1], abs=1e-12)
    # feature 0 is the row's number, and so is the target: what standardises one standardises the
    # other
    for rows in (train, above):
        assert torch.allclose(rows["a"][:, 0], rows["b"])
    assert len(torch.cat([train["b"], above["b"]]).unique()) == 32
    assert torch.equal(exact.validation_a, above["a"])


@pytest.mark.parametrize("dataset", ["diabetes", "breast-cancer", "wine"])
def test_the_solution_is_scikit_learns_on_rescaled_features(dataset: str) -> None:
    task = RidgeCv() if dataset == "diabetes" else LogisticCv(dataset=f"sklearn:{dataset}")
    problem, exact, theta = built(task, seed=1)
    rows = {name: leaf.numpy() for name, leaf in problem.lower_data.whole.items()}
    # with z_j = x_j e^{θ_j/2}: one penalty for all, and their α is n times ours
    scale = torch.exp(-theta["log_penalty"] / 2)
    n = len(rows["a"])
    model = LogisticRegression(
        C=1 / n, fit_intercept=False, tol=1e-10, max_iter=5000, solver="newton-cg"
    )
    target, close = rows.get("label"), {"rtol": 1e-4, "atol": 1e-6}
    if dataset == "diabetes":
        model = Ridge(alpha=n, fit_intercept=False, tol=1e-14)
        target, close = rows["b"], {"rtol": 1e-9, "atol": 1e-12}
    found = torch.from_numpy(model.fit(rows["a"] * scale.numpy(), target).coef_) * scale
    assert torch.allclose(exact.solution(theta)["x"], found, **close)


@pytest.mark.parametrize(
    ("task", "dtype"),
    [(RidgeCv(), F64), (LogisticCv(dataset="sklearn:iris", penalties="classes"), torch.float32)],
)
def test_the_metrics_are_value_stationarity_and_distance(task: Any, dtype: torch.dtype) -> None:
    _, exact, theta = built(task)
    x = {name: leaf + 0.1 for name, leaf in exact.solution(theta).items()}
    figures = task.problem(0, CPU, dtype).evaluate(
        *({name: leaf.to(dtype) for name, leaf in tree.items()} for tree in (theta, x))
    )
    assert figures["value_function"] == pytest.approx(float(exact.value(theta)), rel=1e-5)
    slope = exact.hypergradient(theta)["log_penalty"]
    assert figures["stationarity"] == pytest.approx(float(slope.norm()), rel=1e-3)
    assert figures["lower_distance"] == pytest.approx(0.1 * x["x"].numel() ** 0.5, rel=1e-4)


def test_newtons_derivatives_are_those_of_the_loss() -> None:
    problem, exact, theta = built(LogisticCv(dataset="sklearn:iris"))
    x = normal(3, 5)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return problem.g(theta, {"x": flat.reshape(3, 5)}, problem.lower_data.whole)

    for found, of in zip(exact._derivatives(theta, {"x": x}), ("grad", "hessian"), strict=True):
        expected = getattr(torch.func, of)(loss)(x.flatten())
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-13)


def test_a_system_that_cannot_be_solved_is_an_error_and_its_metrics_nan() -> None:
    exact = LogisticCv().closed_form(0, CPU, F64)
    hopeless = type(exact)(exact.train, exact.validation, exact.vectors, max_steps=2)
    with rejects("not-converged", "max_steps", of=NumericalError):
        # the classes are all but separated
        hopeless.solution({"log_penalty": torch.full((31,), -9.0, dtype=F64)})
    problem = LogisticCv(bound=1000.0).problem(0, CPU, F64)
    figures = problem.evaluate({"log_penalty": torch.full((31,), -500.0, dtype=F64)}, problem.x0)
    missing = {name for name, value in figures.items() if math.isnan(value)}
    assert missing == {"value_function", "stationarity", "lower_distance"}


# --- tables of files
# --------------------------------------------------------------------------------------------------


def rows_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Features and signs of 120 training or 60 validation rows, the latter with nothing in their
    last column.
    """
    rng = np.random.default_rng(len(name))
    size, last = (120, 0.5) if name == "small" else (60, 0)
    features = rng.normal(size=(size, 5)) * [1, 0.2, 3, 1, last]
    score = features @ [1.0, -2, 0.3, 0, 0] + rng.logistic(size=size)
    return features, np.where(score > 1, 1, -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two LIBSVM files below a folder of data."""
    path = tmp_path_factory.mktemp("data")
    for name in ("small", "small.t"):
        dump_svmlight_file(*rows_of(name), str(path / name), zero_based=False)
    return path


def benchmark_task(folder: Path, **fields: object) -> LogisticCv:
    names = {"dataset": f"libsvm:{folder}/small", "validation": f"libsvm:{folder}/small.t"}
    plain = {"standardise": False, "intercept": False, "start": "random"}
    return LogisticCv(**(names | plain | fields))


def test_one_file_trains_and_the_other_validates_as_the_field_s_benchmark_has_it(
    folder: Path,
) -> None:
    problem = benchmark_task(folder).problem(3, CPU, F64)
    theta, x = problem.theta0, problem.x0
    fits = [
        -torch.nn.functional.logsigmoid(torch.from_numpy(b) * (torch.from_numpy(a) @ x["x"][0]))
        for a, b in map(rows_of, ("small", "small.t"))
    ]
    below = fits[0].mean() + 0.5 * (theta["log_penalty"].exp() * x["x"][0] ** 2).sum()
    assert torch.isclose(problem.g(theta, x, problem.lower_data.whole), below, rtol=1e-12)
    for role in hgms_core.ROLES:
        above = problem.f(theta, x, problem.upper_data[role].whole)
        assert torch.isclose(above, fits[1].mean(), rtol=1e-12)


def test_files_are_looked_for_below_the_folder_of_data_and_have_to_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGMS_DATA", str(folder))
    assert load_table("libsvm:small").features == pytest.approx(rows_of("small")[0])
    assert load_table("libsvm:small.t", 5).features.shape == (60, 5)
    with rejects("unreadable-file", "libsvm:small", of=DataError):
        load_table("libsvm:small", 4)
    (folder / "odd").write_text("1 1:1\n7 2:1\n")
    for name, code in (("sklearn:iris", "wrong-shape"), ("libsvm:odd", "wrong-value")):
        with rejects(code, name, of=DataError):
            benchmark_task(folder, validation=name).problem(0, CPU, F64)


# --- tables of others
# --------------------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "wide").write_text("1 2000000000:1\n")
    for name, code in (("folder", "unreadable-file"), ("wide", "too-large")):
        place = f"libsvm:{tmp_path / name}"
        with rejects(code, place):
            load_table(place)
    fine = np.ones((3, 2))
    cases = (
        (fine[0], 2, "wrong-shape"),
        (fine, 2, "wrong-shape"),
        (fine * np.nan, 3, "not-finite"),
    )
    for features, count, code in cases:
        with rejects(code, "here", of=DataError):
            Table(features, np.arange(count), "here")
    for given, place in (
        ({"dataset": "sklearn:iriss"}, "dataset"),
        ({"shares": (0.5, 0.5, 0.5)}, "shares"),
        ({"shares": (0.5, 0.5, 0.0)}, "shares"),
    ):
        with rejects("wrong-value", place, of=ConfigError):
            RidgeCv(**given)
