"""Our regularisation selection and softmax cleaning are those of benchopt's bilevel benchmark,
whose solvers run from a clone.

Needs benchopt, and the clone of benchopt/benchmark_bilevel whose folder stands in
BENCHMARK_BILEVEL.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hgms.tasks.cleaning import HyperCleaning, Start
from hgms.tasks.regression import LogisticCv

CLONE = os.environ.get("BENCHMARK_BILEVEL", "")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "bilevel"
CPU = torch.device("cpu")
DOUBLE = torch.float64

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not CLONE, reason="BENCHMARK_BILEVEL names no clone of benchopt/benchmark_bilevel"
    ),
    pytest.mark.filterwarnings("ignore"),  # of jax, jaxopt and benchopt
]


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(CLONE)


def task_of(kind: str, tmp_path: Path) -> LogisticCv | HyperCleaning:
    if kind == "ijcnn1":
        return LogisticCv(dataset="sklearn:breast-cancer", intercept=False, start="random")
    if kind == "covtype":
        return LogisticCv(dataset="sklearn:wine", intercept=False, penalties="classes", theta0=-2.0)
    rng = np.random.default_rng(0)  # their data set has 20,000 training images, whatever they are
    labels = np.arange(25_100) % 10
    images = rng.integers(0, 100, (25_100, 3, 3))
    images = images + 15 * labels[:, None, None] * rng.integers(0, 2, (1, 3, 3))
    np.savez(tmp_path / "images.npz", images=images.astype(np.uint8), labels=labels)
    return HyperCleaning(
        dataset=f"npz:{tmp_path / 'images.npz'}",
        corruption=0.5,
        noise="uniform-including-true",
        hidden=0,
        omega=0.2,
        standardise=True,
        start=Start(lower="zeros", theta0=-2.0),
        train_size=20_000,
        validation_size=5_000,
        test_size=100,
        validation_split=(1, 1, 1),
    )


@pytest.mark.parametrize("kind", ["ijcnn1", "covtype", "mnist"])
def test_losses_and_gradients_are_the_benchmark_s_own(kind: str, tmp_path: Path) -> None:
    import jax
    from comparison import exported, flat, nested
    from peers import problem_of

    jax.config.update("jax_enable_x64", True)
    task = task_of(kind, tmp_path)
    problem = task.problem(1, CPU, DOUBLE)
    arrays = exported(problem, 1, getattr(task, "omega", 0.0))
    theirs = problem_of(Path(CLONE), kind, arrays)
    (inner, rows, _, _), (outer, upper_rows, _, _) = theirs["pb_inner"], theirs["pb_outer"]
    rng = np.random.default_rng(3)
    point = [
        arrays["x0"] + 0.1 * rng.normal(size=arrays["x0"].shape),
        arrays["theta0"] + rng.normal(size=arrays["theta0"].shape),
    ]
    theta, x = nested(kind, problem, point[1], point[0])
    whole = problem.lower_data.whole, problem.upper_data["stop"].whole
    for ours, function, batch, size in (
        (problem.g, inner, whole[0], rows),
        (problem.f, outer, whole[1], upper_rows),
    ):
        value, slopes = jax.value_and_grad(
            lambda x, t, call=function, n=size: call(x, t, 0, n), argnums=(0, 1)
        )(*point)
        assert float(ours(theta, x, batch)) == pytest.approx(float(value), rel=1e-11)
        above, below = (torch.func.grad(ours, argnums=at)(theta, x, batch) for at in (0, 1))
        for mine, other in zip(flat(kind, above, below), (slopes[1], slopes[0]), strict=True):
            assert mine == pytest.approx(np.asarray(other), rel=1e-9, abs=1e-13)
    if kind != "ijcnn1":
        return
    exact = task.closed_form(1, CPU, DOUBLE)  # type: ignore[union-attr]
    own = theirs["metrics"](point[0], point[1])  # their L-BFGS stops at a gradient of 1e-3
    assert own["value_func"] == pytest.approx(float(exact.value(theta)), rel=1e-3)
    assert own["value"] ** 0.5 == pytest.approx(
        float(exact.hypergradient(theta)["log_penalty"].norm()), rel=2e-2
    )
