"""Ridge and logistic regression on real tables: against scikit-learn, against finite
differences, and the data.
"""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import dump_svmlight_file, load_diabetes, load_wine
from support.helpers import finite_differences, rejects

import hgms_core
from hgms.tasks.regression import LogisticCv, RidgeCv, load_table
from hgms_core import ConfigError, DataError, MissingExtra, NumericalError

CPU = torch.device("cpu")
DOUBLE = torch.float64

TASKS = [
    RidgeCv(),
    LogisticCv(),
    LogisticCv(dataset="sklearn:wine"),
    LogisticCv(dataset="sklearn:iris", penalties="classes"),
]


def theta_of(problem: hgms_core.Problem) -> dict[str, torch.Tensor]:
    theta0 = problem.theta0["log_penalty"]
    return {
        "log_penalty": torch.linspace(-4, 0.5, theta0.numel(), dtype=DOUBLE).reshape(theta0.shape)
    }


def test_parts_are_disjoint_and_standardised_with_the_training_rows(tmp_path: Path) -> None:
    features = np.column_stack([np.arange(40.0), np.full(40, 0.1), np.arange(40.0) ** 2])
    dump_svmlight_file(features, np.arange(40.0), str(tmp_path / "numbered"))
    task = RidgeCv(dataset=f"libsvm:{tmp_path / 'numbered'}", shares=(0.5, 0.3, 0.2))
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    train = problem.lower_data.whole
    assert torch.allclose(train["a"].mean(0), torch.zeros(3, dtype=DOUBLE), atol=1e-12)
    # the second one is constant
    assert train["a"].std(0, correction=0).tolist() == pytest.approx([1, 0, 1], abs=1e-12)
    assert float(train["b"].mean()) == pytest.approx(0, abs=1e-12)
    assert float(train["b"].std(correction=0)) == pytest.approx(1)
    # feature 0 is the row's number, and so is the target: what standardises one standardises the
    # other
    for rows in (train, problem.upper_data["select"].whole):
        assert torch.allclose(rows["a"][:, 0], rows["b"])
    values = torch.cat([train["b"], problem.upper_data["stop"].whole["b"]])
    assert len(values.unique()) == 32
    assert torch.equal(exact.validation_a, problem.upper_data["differentiate"].whole["a"])


def test_ridge_is_scikit_learns_on_rescaled_features() -> None:
    from sklearn.linear_model import Ridge

    task = RidgeCv()
    problem = task.problem(1, CPU, DOUBLE)
    exact = task.closed_form(1, CPU, DOUBLE)
    theta = theta_of(problem)
    rows = problem.lower_data.whole
    # with z_j = x_j e^{θ_j/2}: one penalty for all, and their α is n times ours
    scale = torch.exp(-theta["log_penalty"] / 2)
    model = Ridge(alpha=len(rows["a"]), fit_intercept=False, tol=1e-14).fit(
        (rows["a"] * scale).numpy(), rows["b"].numpy()
    )
    assert torch.allclose(
        exact.solution(theta)["x"], torch.from_numpy(model.coef_) * scale, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("dataset", ["sklearn:breast-cancer", "sklearn:wine"])
def test_logistic_is_scikit_learns_on_rescaled_features(dataset: str) -> None:
    from sklearn.linear_model import LogisticRegression

    task = LogisticCv(dataset=dataset)
    problem = task.problem(1, CPU, DOUBLE)
    exact = task.closed_form(1, CPU, DOUBLE)
    theta = theta_of(problem)
    rows = problem.lower_data.whole
    scale = torch.exp(-theta["log_penalty"] / 2)
    model = LogisticRegression(
        C=1 / len(rows["a"]), fit_intercept=False, tol=1e-10, max_iter=5000, solver="newton-cg"
    )
    model.fit((rows["a"] * scale).numpy(), rows["label"].numpy())
    assert torch.allclose(
        exact.solution(theta)["x"], torch.from_numpy(model.coef_) * scale, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_stationary_and_the_value_is_the_upper_loss_there(
    task: RidgeCv | LogisticCv,
) -> None:
    problem = task.problem(2, CPU, DOUBLE)
    exact = task.closed_form(2, CPU, DOUBLE)
    theta = theta_of(problem)
    x = exact.solution(theta)
    grads, _ = hgms_core.gradient(problem.g, theta, x, problem.lower_data.whole)
    assert float(grads[0].norm()) < 1e-9
    assert torch.isclose(
        exact.value(theta), problem.f(theta, x, problem.upper_data["stop"].whole), rtol=1e-12
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_hypergradient_is_the_slope_of_the_value(task: RidgeCv | LogisticCv) -> None:
    problem = task.problem(3, CPU, DOUBLE)
    exact = task.closed_form(3, CPU, DOUBLE)
    theta = theta_of(problem)
    found = exact.hypergradient(theta)["log_penalty"]
    slopes = finite_differences(exact.value, theta, step=1e-4)["log_penalty"]
    assert torch.allclose(found, slopes, rtol=1e-5, atol=1e-8)
    assert float(found.norm()) > 1e-3


@pytest.mark.parametrize(("task", "dtype"), [(TASKS[0], torch.float64), (TASKS[3], torch.float32)])
def test_evaluate_returns_the_declared_metrics(
    task: RidgeCv | LogisticCv, dtype: torch.dtype
) -> None:
    problem = task.problem(0, CPU, dtype)
    exact = task.closed_form(0, CPU, DOUBLE)
    theta = theta_of(problem)
    x = {name: leaf + 0.1 for name, leaf in exact.solution(theta).items()}
    rough = {name: leaf.to(dtype) for name, leaf in theta.items()}
    figures = problem.evaluate(rough, {name: leaf.to(dtype) for name, leaf in x.items()})
    assert list(figures) == list(task.metrics)
    assert figures["value_function"] == pytest.approx(float(exact.value(theta)), rel=1e-5)
    assert figures["stationarity"] == pytest.approx(
        float(exact.hypergradient(theta)["log_penalty"].norm()), rel=1e-3
    )
    assert figures["lower_distance"] == pytest.approx(0.1 * x["x"].numel() ** 0.5, rel=1e-4)


def test_test_figures_are_those_of_the_untouched_rows() -> None:
    from sklearn.metrics import r2_score

    task = RidgeCv(shares=(0.4, 0.2, 0.4))
    problem = task.problem(0, CPU, DOUBLE)
    exact = task.closed_form(0, CPU, DOUBLE)
    x = exact.solution(problem.theta0)
    raw, target = load_diabetes(return_X_y=True)
    order = torch.randperm(442, generator=hgms_core.Key(0).fold("ridge-cv").generator()).numpy()
    train = order[:177]
    test = order[265:]
    scaled = (raw[test] - raw[train].mean(0)) / raw[train].std(0)
    said = scaled @ x["x"].numpy() * target[train].std() + target[train].mean()
    assert problem.evaluate(problem.theta0, x)["test_r2"] == pytest.approx(
        r2_score(target[test], said), rel=1e-9
    )


def test_a_value_that_cannot_be_solved_for_is_nan_and_the_rest_is_not() -> None:
    problem = LogisticCv(bound=1000.0).problem(0, CPU, DOUBLE)
    figures = problem.evaluate({"log_penalty": torch.full((31,), -500.0, dtype=DOUBLE)}, problem.x0)
    missing = {name for name, value in figures.items() if math.isnan(value)}
    assert missing == {"value_function", "stationarity", "lower_distance"}


def rows_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Features and signs of 120 training or 60 validation rows, the latter with nothing in their
    last column.
    """
    rng = np.random.default_rng(len(name))
    features = rng.normal(size=(120 if name == "small" else 60, 5)) * [
        1,
        0.2,
        3,
        1,
        0.5 * (name == "small"),
    ]
    return features, np.where(
        features @ [1.0, -2, 0.3, 0, 0] + rng.logistic(size=len(features)) > 1, 1, -1
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two LIBSVM files below a folder of data."""
    path = tmp_path_factory.mktemp("data")
    for name in ("small", "small.t"):
        dump_svmlight_file(*rows_of(name), str(path / name), zero_based=False)
    return path


def benchmark_task(folder: Path, **fields: object) -> LogisticCv:
    names = {"dataset": f"libsvm:{folder}/small", "validation": f"libsvm:{folder}/small.t"}
    return LogisticCv(
        **{**names, "standardise": False, "intercept": False, "start": "random", **fields}
    )


def test_one_file_trains_and_the_other_validates_as_the_field_s_benchmark_has_it(
    folder: Path,
) -> None:
    problem = benchmark_task(folder).problem(3, CPU, DOUBLE)
    theta = problem.theta0
    x = problem.x0
    (a, b), (other, c) = (map(torch.from_numpy, rows_of(name)) for name in ("small", "small.t"))

    def loss(rows: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(sign * (rows @ x["x"][0])).mean()

    regulariser = 0.5 * (theta["log_penalty"].exp() * x["x"][0] ** 2).sum()
    assert torch.isclose(
        problem.g(theta, x, problem.lower_data.whole), loss(a, b) + regulariser, rtol=1e-12
    )
    for role in hgms_core.ROLES:
        assert torch.isclose(
            problem.f(theta, x, problem.upper_data[role].whole), loss(other, c), rtol=1e-12
        )


def test_a_random_start_is_normal_below_and_log_uniform_above(folder: Path) -> None:
    task = benchmark_task(folder, theta0=0.5)
    starts = [task.problem(seed, CPU, DOUBLE) for seed in range(100)]
    theta = torch.stack([problem.theta0["log_penalty"] for problem in starts]) - 0.5
    x = torch.stack([problem.x0["x"] for problem in starts])
    assert theta.max() < 0
    assert float(theta.exp().mean()) == pytest.approx(0.5, abs=0.05)
    assert (float(x.mean()), float(x.std())) == (
        pytest.approx(0, abs=0.15),
        pytest.approx(1, abs=0.1),
    )
    assert torch.equal(task.problem(7, CPU, torch.float32).x0["x"], starts[7].x0["x"].float())
    constant = benchmark_task(folder, start="zeros", theta0=-2.0, penalties="classes").problem(
        0, CPU, DOUBLE
    )
    assert constant.theta0["log_penalty"].tolist() == [[-2.0]]
    assert not constant.x0["x"].any()


def test_files_are_looked_for_below_the_folder_of_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HGMS_DATA", str(folder))
    assert load_table("libsvm:small").features == pytest.approx(rows_of("small")[0])
    assert load_table("libsvm:small.t", 5).features.shape == (60, 5)
    with rejects("unreadable-file", "libsvm:small", of=DataError):
        load_table("libsvm:small", 4)
    with rejects("wrong-shape", "sklearn:iris", of=DataError):
        benchmark_task(folder, validation="sklearn:iris").problem(0, CPU, DOUBLE)


def test_validation_rows_of_an_unknown_class_are_refused(folder: Path) -> None:
    path = folder / "odd"
    path.write_text("1 1:1\n7 2:1\n")
    with rejects("wrong-value", f"libsvm:{path}", of=DataError):
        benchmark_task(folder, validation=f"libsvm:{path}").problem(0, CPU, DOUBLE)


def test_a_libsvm_file_is_read_like_the_table_it_holds(tmp_path: Path) -> None:
    features, target = load_wine(return_X_y=True)
    path = tmp_path / "wine.txt"
    dump_svmlight_file(features, target + 5, str(path))
    one, other = (
        LogisticCv(dataset=name).problem(0, CPU, DOUBLE).lower_data.whole
        for name in (f"libsvm:{path}", "sklearn:wine")
    )
    assert torch.allclose(one["a"], other["a"], atol=1e-9)
    assert torch.equal(one["label"], other["label"])


@pytest.mark.parametrize(
    ("text", "code", "of"),
    [
        (None, "unreadable-file", DataError),
        ("1 1:2.0 2:\nno numbers\n", "unreadable-file", DataError),
        ("1 99999999999999999999:1\n2 1:1\n", "unreadable-file", DataError),
        ("1 1:2.0\n2 1:nan\n3 1:1\n", "not-finite", DataError),
        ("4 1:1\n4 1:2\n4 1:3\n4 1:0\n", "wrong-value", DataError),
        ("4 1:1\n3 1:2\n", "too-few-rows", DataError),
        # 44 GB where every row is as long as the longest
        ("1 99999999:1\n" * 55, "too-large", ConfigError),
        # 88 MB, but 320 GB where a system in its columns is solved
        ("1 199999:1\n" * 55, "too-large", ConfigError),
    ],
)
def test_what_is_wrong_with_a_libsvm_file_is_said(
    tmp_path: Path, text: str | None, code: str, of: type
) -> None:
    path = tmp_path / "rows"
    if text is not None:
        path.write_text(text)
    with rejects(code, f"libsvm:{path}", of=of):
        RidgeCv(dataset=f"libsvm:{path}").problem(0, CPU, DOUBLE)


def test_numbers_are_not_taken_for_classes(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("".join(f"{i} 1:{i}\n" for i in range(30)))
    with rejects("wrong-value", f"libsvm:{path}", of=DataError):
        LogisticCv(dataset=f"libsvm:{path}").problem(0, CPU, DOUBLE)


def test_openml_is_asked_for_name_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    tables = {"boston": np.arange(20.0).reshape(10, 2), "mixed": np.array([["a", 1.0]], object)}

    def fetch(name: str, *, version: int | str, as_frame: bool, parser: str) -> object:
        asked.append((name, version, as_frame))
        if name not in tables:
            raise ConnectionError("no route")
        data = tables[name]
        return types.SimpleNamespace(data=data, target=np.array(["1", "2.5"] * 5)[: len(data)])

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    rows = RidgeCv(dataset="openml:boston@3").problem(0, CPU, DOUBLE).lower_data.whole
    assert len(rows["b"].unique()) == 2
    assert load_table("openml:boston").target.tolist() == ["1", "2.5"] * 5
    assert asked == [("boston", 3, False), ("boston", "active", False)]
    for name, code in (("gone", "cannot-download"), ("mixed", "wrong-type")):
        with rejects(code, f"openml:{name}", of=DataError):
            load_table(f"openml:{name}")


class Rows(dict):
    """Stands for datasets.Dataset."""

    column_names = property(list)


def test_a_table_of_the_hub_is_its_numeric_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    label = [0, 1] * 10
    tables = {
        ("good", "v1"): Rows(
            note=["x"] * 20, label=label, size=list(range(20)), width=[0.5, 1.5] * 10
        ),
        ("words", None): Rows(text=["x"] * 20, label=label),
    }
    module = types.ModuleType("datasets")
    module.load_dataset = lambda name, *, split, revision: tables[name, revision]
    monkeypatch.setitem(sys.modules, "datasets", module)
    table = load_table("hub:good@v1")
    assert table.features.tolist() == [[float(i), 0.5 + i % 2] for i in range(20)]
    assert table.target.tolist() == label
    for name, code in (("words", "missing-column"), ("gone", "cannot-download")):
        with rejects(code, f"hub:{name}", of=DataError):
            load_table(f"hub:{name}")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("hub:a/b", "datasets", "hub"), ("sklearn:iris", "sklearn", "sklearn")],
)
def test_a_missing_extra_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with rejects("missing-package", "dataset", of=MissingExtra) as caught:
        load_table(name)
    assert caught.value.install == f"pip install 'hgms[{extra}]'"


def test_newton_says_when_it_does_not_reach_its_tolerance() -> None:
    exact = LogisticCv().closed_form(0, CPU, DOUBLE)
    hopeless = type(exact)(exact.train, exact.validation, exact.vectors, max_steps=2)
    with rejects("not-converged", "max_steps", of=NumericalError):
        # the classes are all but separated
        hopeless.solution({"log_penalty": torch.full((31,), -9.0, dtype=DOUBLE)})
