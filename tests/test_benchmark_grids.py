"""The grids under benchmarks/ describe what exists: every one builds, at every scale, with every method fitting its task."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hgms_core.grid import load

ROOT = Path(__file__).resolve().parent.parent / "benchmarks"
GRIDS = sorted(path for path in ROOT.rglob("*.toml") if "[[method]]" in path.read_text(encoding="utf-8"))


@pytest.mark.plugins
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_builds_at_every_scale(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for scale in (None, *table.get("scale", {})):
        grid = load(table, source=path.name, scale=scale, sets=['run.device="cpu"'])
        assert len(grid.cells()) == len(grid.tasks) * len(grid.methods) * len(grid.seeds)
        assert {pair.task.name for pair in grid.pairs.values()} == {one.name for one in grid.tasks}


def test_the_paper_s_experiments_are_there_with_its_five_methods() -> None:
    for name in ("cleaning", "imbalanced"):
        table = tomllib.loads((ROOT / "paper" / f"{name}.toml").read_text(encoding="utf-8"))
        assert {"hg-ms", "hg-baseline", "v-pbgd", "g-pbgd", "iaptt-gm"} <= {one["name"] for one in table["method"]}
        assert "cpu" in table["scale"]
    assert {path.stem for path in GRIDS} >= {"cleaning", "cleaning-sweep", "imbalanced", "imbalanced-sweep", "softmax-cleaning"}
