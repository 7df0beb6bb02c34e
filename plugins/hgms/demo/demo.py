"""``hgms demo``: the main job on data that ships with scikit-learn, in a minute on two cores,
with a table and pictures.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import frozen

from hgms.comparison import Comparison, compare
from hgms.demo.pictures import FORMATS, draw_weights
from hgms.report import build, draw_curves, save
from hgms.results import Table


@frozen(kw_only=True)
class Demo:
    """The comparison of the demo, the pictures it wrote, the folder it wrote into, and how long
    each run took.
    """

    comparison: Comparison
    pictures: list[Path]
    folder: Path
    seconds: float

    @property
    def table(self) -> Table:
        return self.comparison.tables[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.table.task,
            "seconds_per_run": self.seconds,
            "metric": self.table.metric,
            "floor": self.table.floor,
            "methods": self.table.as_dict()["methods"],
            "pictures": [str(path) for path in self.pictures],
        }


def settings() -> Mapping[str, Any]:
    """What is run: the tables of a grid file without budget and seeds."""
    return tomllib.loads(files("hgms.demo").joinpath("demo.toml").read_text(encoding="utf-8"))


def run_demo(
    out: str | Path = "hgms-demo",
    *,
    seeds: int = 10,
    seconds: float = 84.0,
    jobs: int = 2,
    progress: bool = True,
) -> Demo:
    """Runs the comparison under one matched budget, ``seconds`` of processor time in all, ``jobs``
    runs at a time (0: one by one in this process); writes run folders and pictures under ``out``.
    """
    out = Path(out)
    grid = settings()
    if (out / "runs").is_dir():
        shutil.rmtree(out / "runs")  # the demo's own folder: a fresh comparison each time
    budget = seconds / (len(grid["method"]) * seeds)
    comparison = compare(
        grid["task"],
        grid["method"],
        f"{budget:.4g}s",
        seeds,
        out / "runs",
        run=grid["run"],
        metric=grid["metric"],
        reference=grid["reference"],
        jobs=jobs,
        progress=progress,
    )
    pictures = [save(comparison.plot(), out / f"differences{suffix}") for suffix in FORMATS]
    pictures += [
        draw_curves(build([out / "runs"]), out / f"accuracy{suffix}") for suffix in FORMATS
    ]
    first = {
        row.method: comparison.result(row.method, comparison.grid.seeds[0])
        for row in comparison.tables[0].rows
    }
    pictures += draw_weights(
        {method: run.records for method, run in first.items()}, out / "weights"
    )
    return Demo(comparison=comparison, pictures=pictures, folder=out, seconds=budget)


__all__ = ["Demo", "run_demo", "settings"]
