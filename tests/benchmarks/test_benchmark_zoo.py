"""benchmarks/tune/zoo*.py: the problems, the rivals' solver, and the arithmetic of the tables."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch

import hgms

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "tune"))
pytest.importorskip("statsmodels")

import zoo_tables  # noqa: E402
from zoo import NETWORKS, ORDINARY, STRUCTURED, ZOO  # noqa: E402

from hgms.tuning.problem import build  # noqa: E402

pytestmark = pytest.mark.extended
FROM_FOLDER = {"rows-mnist", "classes-mnist", "sources"}


def test_the_tables_have_the_structured_problems_of_the_zoo() -> None:
    assert tuple(STRUCTURED) == zoo_tables.STRUCTURED
    assert len(STRUCTURED) == len(ORDINARY) == 12


@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_problem_builds_and_no_row_is_in_two_parts(name: str) -> None:
    if name in FROM_FOLDER and "HGMS_DATA" not in os.environ:
        pytest.skip("needs the folder HGMS_DATA")
    arguments = ZOO[name](1)
    parts = [arguments[part] for part in ("train", "validation", "test") if part in arguments]
    names = ("model", "loss", "train")
    validation = arguments.get("validation")
    rest = (validation, arguments["learn"], None, 1)
    problem = build(*[arguments[part] for part in names], *rest).problem
    assert problem.is_smooth
    assert problem.total == sum(len(part["y"]) for part in parts[:-1])
    if name in ("sources", "iris-2", "modechoice-2", "fair-2", "anes96-2", "randhie-2"):
        return  # these data have equal rows
    rows = torch.cat([part["x"].flatten(1) for part in parts])
    assert len(torch.unique(rows, dim=0)) >= len(rows) - 2
    assert len(parts[-1]["y"]) >= 75


@pytest.mark.parametrize("name", ["diabetes", "rows-star98"])
def test_the_start_of_a_rival_is_the_baseline_of_tune(name: str) -> None:
    """Both train on the same rows with the same solver."""
    pytest.importorskip("cleanlab")
    from rivals import Newton

    assert name not in NETWORKS
    arguments = ZOO[name](2)
    objective = Newton(arguments, 2, 60.0)
    held_out = objective(objective.problem.space.start)
    result = hgms.tune(**arguments, budget="300 steps", seed=2)
    row = next(row for row in result.table if row.name == "start")
    assert held_out == pytest.approx(row.loss, rel=2e-3)
    assert objective.test_loss() == pytest.approx(row.test_loss, rel=2e-3)


def records(factor: float) -> list[dict]:
    """Ten seeds of one problem: tune has ``factor`` times the loss of the best baseline."""
    rows = []
    for seed in range(10):
        level = 1 + 0.01 * seed
        noise = 1 + 0.001 * (-1) ** seed
        rows.append(
            {
                "kind": "tune",
                "problem": "groups-16",
                "competitor": "tune",
                "seed": seed,
                "engine": "implicit",
                "test_loss": factor * level * noise,
                "is_learned": True,
                "selected": "learned, prior 0.1",
                "d": 16,
                "baselines": ["start", "shared level"],
                "table": {"start": [0.0, 2 * level], "shared level": [0.0, level]},
                "total_seconds": 1.0,
            }
        )
    return rows


@pytest.mark.parametrize(
    ("factor", "mark"), [(0.9, "| better |"), (1.0, "|  |"), (1.1, "| **worse** |")]
)
def test_the_mark_of_a_problem_follows_the_interval(factor: float, mark: str) -> None:
    line = zoo_tables.baselines(records(factor)).splitlines()[-1]
    assert "| shared level |" in line
    assert f"| {zoo_tables.signed(100 * (factor - 1))} (" in line
    assert line.endswith(mark)


def test_a_method_without_a_finite_loss_counts_as_failed() -> None:
    failed = [
        {
            "kind": "methods",
            "problem": "groups-16",
            "competitor": "soba",
            "seed": seed,
            "test_loss": math.nan if seed < 3 else 5.0,
            "is_finite": seed >= 3,
            "total_seconds": 1.0,
        }
        for seed in range(10)
    ]
    line = zoo_tables.methods([*records(0.9), *failed]).splitlines()[-1]
    assert line.startswith("| `soba` | 10 |")
    assert line.endswith("| `groups-16` | 3 |")
