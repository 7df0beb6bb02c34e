"""The benchmarks of speed: sides that differ are refused, and the table says what is met. No
test looks at a clock.
"""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def hypergradient() -> ModuleType:
    import bench_hypergradient

    return bench_hypergradient


def small_point(bench: ModuleType) -> Any:
    problem = bench.cleaning("digits", train_size=80, validation_size=20, test_size=10, hidden=6)
    return bench.point(problem, training_steps=50, steps=4)


def test_ours_and_the_loop_by_hand_give_the_same_hypergradient(hypergradient: ModuleType) -> None:
    calls, errors = hypergradient.agreeing(
        small_point(hypergradient), ["ours", "ours, exact products", "by hand"]
    )
    assert len(calls) == 3
    assert max(errors.values()) < 1e-5


def test_a_side_that_computes_something_else_is_refused(
    hypergradient: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = hypergradient.Side(lambda at: lambda: hypergradient.plain(at) * (1 + 1e-3))
    monkeypatch.setitem(hypergradient.SIDES, "wrong", wrong)
    with pytest.raises(
        SystemExit, match=r"wrong computes something else: relative difference 1\.0e-03"
    ):
        hypergradient.agreeing(small_point(hypergradient), ["ours", "wrong"])


def test_without_images_there_are_random_ones_of_mnist_s_shape(hypergradient: ModuleType) -> None:
    problem = hypergradient.cleaning("digits")
    assert problem.lower_data.whole["pixels"].shape == (5000, 784)
    assert {name: tuple(leaf.shape) for name, leaf in problem.x0.items()}["hidden.weight"] == (
        300,
        784,
    )


def test_an_outer_step_with_fewer_products_is_refused() -> None:
    import bench_small

    step = bench_small.ours(
        bench_small.Work(rows=20, unknowns=2, candidates=2, lower_steps=2, products=10)
    )
    with pytest.raises(SystemExit, match="CG made"):
        step()


def test_the_examples_of_what_the_scripts_share() -> None:
    import turns

    assert doctest.testmod(turns) == doctest.TestResults(failed=0, attempted=3)


def test_sides_take_turns() -> None:
    import turns

    calls: list[str] = []
    ticks = iter(range(10_000))
    sides = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    spent = turns.take_turns(sides, rounds=4, seconds=0.0, clock=lambda: float(next(ticks)))
    assert spent == {"a": [1.0] * 4, "b": [1.0] * 4}
    assert sorted(calls[-2:]) == sorted(calls[-4:-2]) == ["a", "b"]


@pytest.fixture
def speed() -> ModuleType:
    import speed

    return speed


def test_a_row_says_what_is_met(speed: ModuleType) -> None:
    def figures(ratio: float) -> dict[str, Any]:
        return {"ratio": {"median": ratio, "q25": 0.9 * ratio, "q75": 1.1 * ratio}}

    parts = {
        "digits": {"methods": {"hg-ms": figures(0.3)}},
        "budget": {"methods": {"hg-ms": figures(3.5), "hg-ms-tilted": figures(1.5)}},
        "others": {"methods": {"darts": figures(0.4), "soba": figures(1.2)}},
        "products": {
            "products": [
                {"what": what, "trajectory": where, "ridge": 1.0, "ratio": ratio}
                for where, what, ratio in (
                    ("near", "cg", 1.0),
                    ("near", "warm", 0.1),
                    ("far", "cg", 1.0),
                    ("far", "warm", 0.3),
                )
            ]
        },
        "first": {"methods": {"hg-ms": {"cold": 30.0, "warm": 5.0}}},
    }
    rows = {row["work"]: speed.speed_row(row) for row in speed.measured(parts)}
    assert [cells[5] for name, cells in rows.items() if "MNIST" in name] == [
        "aim",
        "**no**",
        "required",
    ]
    assert rows["`hg-ms` on digits, seconds a step / before"][1:6] == [
        "0.3",
        "0.27–0.33",
        "≤ 0.33",
        "≤ 0.2",
        "required",
    ]
    assert [cells[5:] for name, cells in rows.items() if name.startswith("every other")] == [
        ["**no**", "soba, the slowest"]
    ]
    assert [cells[5:] for name, cells in rows.items() if name.startswith("products")] == [
        ["required", "warm, far, ridge 1"]
    ]
    assert rows["small outer step / jitted JAX"][5] == "not measured"


def test_every_row_has_a_part_that_is_run(speed: ModuleType) -> None:
    import argparse

    options = argparse.Namespace(against="HEAD", budget=60, quick=True, set=[])
    commands = speed.commands(options)
    assert {row.part for row in speed.ROWS} == set(commands)
    assert all((ROOT / "benchmarks" / command[0]).exists() for command in commands.values())


@pytest.mark.nightly
def test_a_worker_carries_out_runs_of_a_checkout(capfd: pytest.CaptureFixture[str]) -> None:
    import bench_today

    with bench_today.Worker(
        ROOT, {"evaluate_every": 5}, "digits", "scalebio", bench_today.ENDLESS
    ) as worker:
        assert worker.answer()[0] == 0  # before the first step
        assert worker.block(2) > 0
    assert worker.process.returncode == 0
    with bench_today.Worker(ROOT, {}, "digits", "scalebio", "2 steps") as worker:
        assert worker.answer()[0] == 2
    worker = bench_today.Worker(ROOT, {"threads": 0}, "digits", "scalebio", "2 steps")
    with worker, pytest.raises(SystemExit, match="ended without an answer"):
        worker.answer()
    assert "threads" in capfd.readouterr().err


def test_settings_are_read_as_toml() -> None:
    import bench_today

    texts = ("run.compile=true", "clock=wall", "threads=2")
    assert [bench_today.setting(text) for text in texts] == [
        ("compile", True),
        ("clock", "wall"),
        ("threads", 2),
    ]


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    import bench_scaling

    sides = {
        "ours": {"median": 1e-2, "q25": 9e-3, "q75": 2e-2},
        "jax, one program": {"median": 1e-4, "q25": 9e-5, "q75": 2e-4},
    }
    sweeps = {
        name: [{"size": size, "sides": sides} for size in sizes]
        for name, (_, _, sizes) in bench_scaling.SWEEPS.items()
    }
    bench_scaling.draw({"sweeps": sweeps}, tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").stat().st_size > 10_000
