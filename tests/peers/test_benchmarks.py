"""The benchmarks against other libraries: every side does the same work, and a side that does
not is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning"),
    pytest.mark.filterwarnings("ignore:JAXopt is no longer:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")


def test_every_side_gives_the_same_hypergradient() -> None:
    import bench_hypergradient as bench

    problem = bench.cleaning("digits", train_size=80, validation_size=20, test_size=10, hidden=6)
    at = bench.point(problem, training_steps=50, steps=4)
    calls, errors = bench.agreeing(at, list(bench.SIDES))
    assert set(calls) == set(errors) == set(bench.SIDES)
    assert all(
        float(torch.as_tensor(call()).double().norm()) > 0
        for name, call in calls.items()
        if "jax" not in name
    )


@pytest.mark.parametrize("sizes", [(30, 12, 2, 3, 4), (50, 20, 4, 5, 10), (40, 15, 1, 2, 3)])
def test_an_outer_step_is_the_same_in_jax(sizes: tuple[int, ...]) -> None:
    import bench_small as bench

    steppers, errors = bench.agreeing(bench.Work(*sizes))
    assert set(steppers) == set(bench.SIDES)
    assert max(errors.values()) < 1e-5


def test_another_problem_in_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_small as bench
    import jax_programs

    program: Callable[..., object] = jax_programs.outer_step
    monkeypatch.setattr(
        jax_programs, "outer_step", lambda decay, *rest: program(1.01 * decay, *rest)
    )
    with pytest.raises(SystemExit, match="jax, one program computes something else"):
        bench.agreeing(bench.Work(30, 12, 2, 3, 4))
