"""The benchmarks of speed: sides that differ are refused. No test looks at a clock."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def test_the_floor_computes_the_hessian_products_of_the_problem() -> None:
    import bench_scaling as bench
    import torch

    from hgms_core import curvature

    work = bench.Work()
    task = bench.problem(work)
    x = 0.1 * torch.randn(
        work.candidates, work.unknowns, generator=torch.Generator().manual_seed(0)
    )
    at_x = curvature(lambda at: task.g(task.theta0, at, task.lower_data.whole), {"x": x[0]})
    torch.testing.assert_close(bench.floor(work, 2)(), at_x.matvec(x[0]))


def test_ours_and_the_loop_by_hand_agree_and_a_side_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import bench_hypergradient as bench

    problem = bench.cleaning("digits", train_size=80, validation_size=20, test_size=10, hidden=6)
    point = bench.point(problem, training_steps=50, steps=4)
    calls, errors = bench.agreeing(point, ["ours", "ours, exact products", "by hand"])
    assert (len(calls), max(errors.values()) < 1e-5) == (3, True)
    wrong = bench.Side(lambda at: lambda: bench.plain(at) * (1 + 1e-3))
    monkeypatch.setitem(bench.SIDES, "wrong", wrong)
    with pytest.raises(SystemExit, match=r"something else: relative difference 1\.0e-03"):
        bench.agreeing(point, ["ours", "wrong"])
