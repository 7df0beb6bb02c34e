"""The grids under benchmarks/ describe what exists: every one builds, at every scale, with every
method fitting its task.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from hgms.comparison.grid_file import load

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"
GRIDS = sorted(
    path for path in ROOT.rglob("*.toml") if "[[method]]" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_builds_at_every_scale(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for scale in (None, *table.get("scale", {})):
        grid = load(table, source=path.name, scale=scale, sets=['run.device="cpu"'])
        assert len(grid.cells()) == len(grid.tasks) * len(grid.methods) * len(grid.seeds)
        assert {pair.task.name for pair in grid.pairs.values()} == {one.name for one in grid.tasks}


def test_a_language_model_has_the_paper_s_settings() -> None:
    path = ROOT / "paper" / "llm" / "math-qwen-2-7b.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    grid = load(table, source=path.name, sets=['run.device="cpu"'])
    found: dict[str, Any] = {label: config.method for (_, label), config in grid.pairs.items()}
    assert set(found) == {"hg-ms", "hg-baseline", "scalebio", "uniform", "less", "rho-loss"}
    assert (grid.seeds, grid.budget.seconds) == ((2424,), 3600 * 9)
    one, other, third = (found[label] for label in ("hg-ms", "hg-baseline", "scalebio"))
    assert [
        (
            each.generator.optimizer.lr,
            each.generator.diversity.noise,
            each.outer.lr,
            each.generator.count,
        )
        for each in (one, other)
    ] == [(1e-5, 1e-3, 0.05, 4), (1e-5, 0, 0.05, 1)]
    assert (third.generator.optimizer.lr, third.generator.alpha, third.outer.lr) == (1e-4, 10, 1.0)
