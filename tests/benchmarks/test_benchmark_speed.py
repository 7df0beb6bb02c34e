"""The benchmarks of speed: sides that differ are refused, and the table says what is met. No
test looks at a clock.
"""

from __future__ import annotations

import argparse
import doctest
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


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


def test_an_outer_step_with_fewer_products_is_refused() -> None:
    import bench_small

    work = bench_small.Work(rows=20, unknowns=2, candidates=2, lower_steps=2, products=10)
    with pytest.raises(SystemExit, match="CG made"):
        bench_small.ours(work)()


def test_sides_take_turns() -> None:
    import turns

    assert doctest.testmod(turns) == (0, 3)
    calls: list[str] = []
    ticks = iter(range(10_000))
    sides = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    spent = turns.take_turns(sides, rounds=4, seconds=0.0, clock=lambda: float(next(ticks)))
    assert spent == {"a": [1.0] * 4, "b": [1.0] * 4}
    assert sorted(calls[-2:]) == sorted(calls[-4:-2]) == ["a", "b"]


def test_a_row_says_what_is_met_and_every_row_has_a_part_that_is_run() -> None:
    import speed

    figures = {"ratio": {"median": 0.3, "q25": 0.27, "q75": 0.33}}
    rows = speed.measured({"digits": {"methods": {"hg-ms": figures}}})
    cells = {row["work"]: speed.speed_row(row) for row in rows}
    assert cells["`hg-ms` on digits, seconds a step / before"][1:6] == [
        "0.3",
        "0.27–0.33",
        "≤ 0.33",
        "≤ 0.2",
        "required",
    ]
    assert cells["small outer step / jitted JAX"][5] == "not measured"
    commands = speed.commands(argparse.Namespace(against="HEAD", budget=60, quick=True, set=[]))
    assert {row.part for row in speed.ROWS} == set(commands)
    assert all((ROOT / "benchmarks" / command[0]).exists() for command in commands.values())


@pytest.mark.nightly
def test_a_worker_carries_out_runs_of_a_checkout() -> None:
    import bench_today

    work = ("digits", "scalebio", bench_today.ENDLESS)
    with bench_today.Worker(ROOT, {"evaluate_every": 5}, *work) as worker:
        assert worker.answer()[0] == 0  # before the first step
        assert worker.block(2) > 0
    assert worker.process.returncode == 0
    with (
        bench_today.Worker(ROOT, {"threads": 0}, *work) as worker,
        pytest.raises(SystemExit, match="ended without an answer"),
    ):
        worker.answer()
