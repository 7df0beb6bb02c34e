"""``hgms demo``: the main job on data that ships with scikit-learn, in under a minute, with a table and pictures."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from attrs import frozen

from hgms_report import draw_accuracy, draw_weights
from hgms_results import Table, table
from hgms_run import Progress, RunConfig, RunResult, run_config

METRIC = "test_accuracy"
REFERENCE = "uniform"

Results = Mapping[str, Sequence[RunResult]]
"""Finished runs by method, in the order of their seeds."""


@frozen(kw_only=True)
class Demo:
    """What the demo found and wrote."""

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


def configs(out: Path, seeds: int, seconds: float) -> list[RunConfig]:
    """Every run of the demo: each method with each seed, ``seconds`` in all."""
    settings = tomllib.loads(files("hgms_demo").joinpath("demo.toml").read_text())
    methods = settings.pop("methods")
    share = seconds / (len(methods) * seeds)
    settings["run"]["out"] = str(out / "runs")
    return [
        RunConfig.from_dict(
            {**settings, "method": {"name": name, **overrides}, "budget": {"seconds": share}, "seed": seed}, source="demo.toml"
        )
        for seed in range(seeds)
        for name, overrides in methods.items()
    ]


def run_demo(out: str | Path = "hgms-demo", *, seeds: int = 3, seconds: float = 54.0, progress: bool = True) -> Demo:
    """Runs the comparison under one matched budget of ``seconds`` in all; writes run folders and pictures under ``out``."""
    out = Path(out)
    if (out / "runs").is_dir():
        shutil.rmtree(out / "runs")  # the demo's own folder: a fresh comparison each time
    found: dict[str, list[RunResult]] = {}
    plan = configs(out, seeds, seconds)
    with Progress(enabled=progress) as view:
        for config in plan:
            found.setdefault(config.method_name, []).append(run_config(config, view=view))
    pictures = draw(found, out, METRIC)
    rows = table(found, METRIC, REFERENCE)
    return Demo(table=rows, results=found, pictures=pictures, folder=out, seconds=seconds / len(plan))


def draw(results: Results, folder: Path, metric: str) -> list[Path]:
    """The pictures of the demo, written into ``folder``; the paths."""
    runs = {method: [run.records for run in each] for method, each in results.items()}
    written = draw_accuracy(runs, folder / "accuracy", metric=f"metric.{metric}", label=f"{metric.replace('_', ' ')} (%)")
    return written + draw_weights(runs, folder / "weights")


__all__ = ["Demo", "configs", "draw", "run_demo"]
