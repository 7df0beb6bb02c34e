"""Small grids for the tests of executors, and what their runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hgms.comparison.grid_file import load
from hgms.plugins import Registry

PLUGIN = Path(__file__).parent / "grid_plugin.py"

GRID = """
budget = "12 steps"
seeds = 4
baselines = false
task = ["bowl"]

[run]
out = "runs"
checkpoint_seconds = 0.0
threads = 1

[[method]]
name = "walk"
pause = 0.01
"""
"""The text of a grid file."""

WALK = {"name": "walk", "pause": 0.01}


def grid(folder: Path, method: Any = WALK, *, seeds: int = 4, budget: str = "12 steps") -> Any:
    run = {"out": str(folder), "checkpoint_seconds": 0.0, "threads": 1}
    table = {"budget": budget, "seeds": seeds, "task": "bowl", "method": [method], "run": run}
    return load(table, registry=Registry.load([PLUGIN]))


def contents(folder: Path) -> dict[str, bytes]:
    """What has to be the same whoever carried the runs out."""
    kept = ("checkpoint", "steps", "summary")
    files = sorted(path for path in folder.rglob("*") if path.name.startswith(kept))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def steps(folder: Path) -> dict[str, bytes]:
    """Of each seed, whatever the method's folder is called."""
    return {path.parent.name: path.read_bytes() for path in folder.rglob("steps.jsonl")}


def begun_twice(folder: Path, count: int = 4) -> list[str]:
    """The seeds whose run was broken off and taken up: nobody knows its processor time."""
    resources = {path.parent.name: path.read_text() for path in folder.rglob("resources.json")}
    assert len(resources) == count
    return [
        seed for seed, text in resources.items() if json.loads(text)["processor_seconds"] is None
    ]


def on_another_machine(folder: Path, duration: float) -> Path:
    """The lease of a process of another machine that is not there any more."""
    folder.mkdir(exist_ok=True)
    marker = folder / ".lease"
    marker.write_text(
        f"filelock/2\npid=1\nhost=another-machine\nmode=lease\ntoken={'0' * 32}\n"
        f"duration={duration}\n"
    )
    return marker
