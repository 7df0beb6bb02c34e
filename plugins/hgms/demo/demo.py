"""``hgms demo``: the main job on data that ships with scikit-learn, in a few minutes on two
cores, with a table and pictures.
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

CALLS = 4000
"""The budget of each run in oracle calls: the same number of steps on every machine."""


@frozen(kw_only=True)
class Demo:
    """The comparison of the demo, the pictures and the folder that it wrote, and the oracle calls
    of each run.
    """

    comparison: Comparison
    pictures: list[Path]
    folder: Path
    calls: int

    @property
    def table(self) -> Table:
        return self.comparison.tables[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.table.task,
            "calls_per_run": self.calls,
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
    calls: int = CALLS,
    jobs: int = 2,
    progress: bool = True,
) -> Demo:
    """Run the comparison with ``calls`` per run, ``jobs`` runs at a time (0: one by one in this
    process); write run folders and pictures under ``out``.
    """
    out = Path(out)
    grid = settings()
    if (out / "runs").is_dir():
        shutil.rmtree(out / "runs")  # the demo's own folder: a fresh comparison each time
    comparison = compare(
        grid["task"],
        grid["method"],
        f"{calls} calls",
        seeds,
        out / "runs",
        run=grid["run"],
        metric=grid["metric"],
        reference=grid["reference"],
        baselines=False,
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
    return Demo(comparison=comparison, pictures=pictures, folder=out, calls=calls)


__all__ = ["Demo", "run_demo", "settings"]
