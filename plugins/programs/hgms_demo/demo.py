"""``hgms demo``: the main job on data that ships with scikit-learn, in under a minute, with a table and pictures."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import frozen

from hgms_compare import Grid, load
from hgms_demo.pictures import FORMATS, draw_weights
from hgms_report import build, draw_curves
from hgms_results import DEFAULT_REFERENCES, Table, table
from hgms_run import Progress, RunResult, run_config

METRIC = "test_accuracy"

Results = Mapping[str, Sequence[RunResult]]
"""Finished runs by method, in the order of their seeds."""


@frozen(kw_only=True)
class Demo:
    """The table of the demo, the pictures it wrote, the folder it wrote into, and how long each run took."""

    table: Table
    results: Results
    pictures: list[Path]
    folder: Path
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": "hyper-cleaning",
            "seconds_per_run": self.seconds,
            "metric": METRIC,
            "methods": self.table.as_dict()["methods"],
            "pictures": [str(path) for path in self.pictures],
        }


def grid(out: Path, seeds: int, seconds: float) -> Grid:
    """Each method with each seed, ``seconds`` in all."""
    table = tomllib.loads(files("hgms_demo").joinpath("demo.toml").read_text())
    table["run"]["out"] = str(out / "runs")
    budget = {"seconds": seconds / (len(table["method"]) * seeds)}
    return load({**table, "budget": budget, "seeds": seeds}, source="demo.toml")


def run_demo(out: str | Path = "hgms-demo", *, seeds: int = 3, seconds: float = 54.0, progress: bool = True) -> Demo:
    """Runs the comparison under one matched budget of ``seconds`` in all; writes run folders and pictures under ``out``."""
    out = Path(out)
    if (out / "runs").is_dir():
        shutil.rmtree(out / "runs")  # the demo's own folder: a fresh comparison each time
    results: dict[str, list[RunResult]] = {}
    cells = grid(out, seeds, seconds).cells()
    first: RunResult | None = None
    with Progress(enabled=progress) as view:
        for cell in cells:
            result = run_config(cell.config, view=view, execution=None if first is None else first.execution)
            first = first or result
            results.setdefault(cell.method, []).append(result)
    study = build([out / "runs"])
    pictures = [draw_curves(study, out / f"accuracy{suffix}") for suffix in FORMATS]
    pictures += draw_weights({method: runs[0].records for method, runs in results.items()}, out / "weights")
    rows = table(results, METRIC, DEFAULT_REFERENCES[0])
    return Demo(table=rows, results=results, pictures=pictures, folder=out, seconds=seconds / len(cells))


__all__ = ["Demo", "grid", "run_demo"]
