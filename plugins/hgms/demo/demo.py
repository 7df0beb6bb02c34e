"""``hgms demo``: the comparison of the README, with a table and pictures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from hgms.comparison import Comparison, compare
from hgms.demo.example import METHODS, make_problem
from hgms.report import build, draw_curves, save
from hgms.results import Table

CALLS = 1500
"""The budget of each run in oracle calls: the same number of steps on every machine."""
FIRST_SEED = 10
"""The budget was chosen on the seeds 0 to 9."""
FORMATS = (".png", ".svg")


@frozen(kw_only=True)
class Demo:
    """The comparison, the pictures, the folder, and the oracle calls of each run."""

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


def run_demo(
    out: str | Path = "hgms-demo", *, seeds: int = 10, calls: int = CALLS, progress: bool = True
) -> Demo:
    """Compare the methods with ``calls`` per run, and write run folders and pictures to ``out``."""
    out = Path(out)
    if (out / "runs").is_dir():
        shutil.rmtree(out / "runs")  # a new comparison each time
    torch.set_num_threads(1)  # the tensors are small
    numbers = range(FIRST_SEED, FIRST_SEED + seeds)
    comparison = compare(
        make_problem, list(METHODS), f"{calls} calls", numbers, out / "runs", progress=progress
    )
    pictures = [save(comparison.plot(), out / f"differences{suffix}") for suffix in FORMATS]
    pictures += [
        draw_curves(build([out / "runs"]), out / f"accuracy{suffix}") for suffix in FORMATS
    ]
    return Demo(comparison=comparison, pictures=pictures, folder=out, calls=calls)
