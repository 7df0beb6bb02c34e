"""The comparison with benchopt's bilevel benchmark: its solvers get our problem, and the page is
what was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from hgms.runs import RunConfig, run_config
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.regression import LogisticCv

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
DOUBLE = torch.float64
TASKS = {
    "ijcnn1": LogisticCv(dataset="sklearn:breast-cancer", intercept=False, start="random"),
    "covtype": LogisticCv(
        dataset="sklearn:wine", intercept=False, penalties="classes", theta0=-2.0
    ),
    "mnist": HyperCleaning(
        hidden=0,
        omega=0.2,
        theta0=-2.0,
        train_size=50,
        validation_size=40,
        validation_split=(1, 1, 1),
    ),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "bilevel")
    import compared

    return compared


def softmax_losses(scores: np.ndarray, label: np.ndarray) -> np.ndarray:
    return np.log(np.exp(scores).sum(1)) - scores[np.arange(len(label)), label]


@pytest.mark.parametrize("kind", TASKS)
def test_exported_arrays_give_the_losses_of_the_problem_by_the_benchmark_s_formulas(
    compared: Any, kind: str
) -> None:
    problem = TASKS[kind].problem(0, CPU, DOUBLE)
    arrays = compared.exported(problem, 0, 0.2)
    rng = np.random.default_rng(1)
    theta = arrays["theta0"] + rng.normal(size=arrays["theta0"].shape)
    x = arrays["x0"] + rng.normal(size=arrays["x0"].shape)
    (a, label), (other, other_label) = (
        (arrays[f"{part}_a"], arrays[f"{part}_label"]) for part in ("train", "validation")
    )
    if kind == "ijcnn1":
        losses, upper = (
            np.log1p(np.exp(-(2 * classes - 1) * (table @ x)))
            for table, classes in ((a, label), (other, other_label))
        )
        lower = losses.mean() + 0.5 * (np.exp(theta) * x**2).sum()
    else:
        matrix = x.reshape(a.shape[1], -1)
        losses = softmax_losses(a @ matrix, label)
        upper = softmax_losses(other @ matrix, other_label)
        lower = (
            losses.mean() + 0.5 * (np.exp(theta) * (matrix**2).sum(0)).sum()
            if kind == "covtype"
            else (losses / (1 + np.exp(-theta))).mean() + 0.2 * (x**2).sum()
        )
    assert compared.kind_of(problem) == arrays["kind"] == kind
    point = compared.nested(kind, problem, theta, x)
    found = (
        problem.g(*point, problem.lower_data.whole),
        problem.f(*point, problem.upper_data["stop"].whole),
    )
    assert [float(value) for value in found] == pytest.approx([lower, upper.mean()], rel=1e-12)
    assert all(map(np.array_equal, (theta, x), compared.flat(kind, *point)))


def test_the_lowest_value_is_below_every_other(compared: Any) -> None:
    task = LogisticCv(dataset="sklearn:iris", bound=3.0)
    exact = task.closed_form(0, CPU, DOUBLE)
    points = torch.from_numpy(np.random.default_rng(0).uniform(-3, 3, (20, 5)))
    least = compared.lowest(task, 0, [])
    assert least <= min(float(exact.value({"log_penalty": point})) for point in points)
    rows = [{"metric.value_function": value} for value in (0.001, np.nan)]
    assert compared.lowest(task, 0, rows) == 0.001


def test_our_runs_and_theirs_become_records_of_one_form(
    compared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = tmp_path / "small.toml"
    grid.write_text(
        'budget = "2 outer steps"\nseeds = [1]\n[[task]]\nname = "logistic-cv"\nlabel = "iris"\n'
        'dataset = "sklearn:iris"\n'
        'penalties = "classes"\n[[method]]\nname = "soba"\n'
    )
    table = {
        "task": {"name": "logistic-cv", "dataset": "sklearn:iris", "penalties": "classes"},
        "method": {"name": "soba"},
        "seed": 1,
        "budget": "2 outer steps",
        "run": {
            "out": str(tmp_path / "runs"),
            "task_label": "iris",
            "label": "soba",
            "compile": False,
            "matmul": "exact",
        },
    }
    run_config(RunConfig.from_dict(table))
    task = LogisticCv(dataset="sklearn:iris", penalties="classes")
    problem = task.problem(1, CPU, torch.float32)
    theta, x = compared.flat("covtype", problem.theta0, problem.x0)
    own = "SABA[step_size=1.0]"
    columns = {"seconds": [0.0, 0.5], "rounds": [0, 7], "theta": [theta, theta - 1], "x": [x, x]}
    stored = {f"{own}|{name}": np.array(values) for name, values in columns.items()}
    about = {"versions": np.array(["jax 1.0"]), f"{own}|own.value": np.array(0.3)}
    np.savez(tmp_path / "iris-1.npz", **about, **stored)
    monkeypatch.setattr(compared, "RECORDS", tmp_path)
    compared.keep(grid, tmp_path / "runs", [tmp_path / "iris-1.npz"])
    ours, theirs = parquet.read_table(tmp_path / "small.parquet").to_pylist()
    keys = ("method", "of", "steps", "seed", "own.value")
    assert [[row.get(key) for key in keys] for row in (ours, theirs)] == [
        ["soba", "hgms", 2, 1, None],
        [own, "benchmark_bilevel", 7, 1, 0.3],
    ]
    exact = task.closed_form(1, CPU, DOUBLE)
    lower = {"log_penalty": problem.theta0["log_penalty"].double() - 1}
    assert theirs["metric.value_function"] == pytest.approx(float(exact.value(lower)), rel=1e-6)
    assert theirs["minimum"] == ours["minimum"] < theirs["metric.value_function"]
    (line,) = [line for line in compared.table_of("small").splitlines() if "SABA" in line]
    assert f"{theirs['metric.value_function'] - theirs['minimum']:.2e}" in line


def test_the_tables_of_the_page_are_what_the_records_make(compared: Any) -> None:
    text = compared.PAGE.read_text(encoding="utf-8")
    assert compared.MARKED.findall(text)
    assert compared.page(text) == text
    curve = (np.array([0.0, 1.0, 2.0]), np.array([3.0, 2.0, 1.0]))
    # a measure is that of the last point that was there
    assert [compared.at(curve, second) for second in (0.0, 0.9, 1.0, 1.5, 9.0)] == [3, 3, 2, 2, 1]
