"""What a comparison has yet to do, without doing it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hgms_compare import sweep as sweeps
from hgms_compare.grid import Grid
from hgms_run import RunFolder


def listing(grid: Grid) -> list[dict[str, Any]]:
    """Every run of the grid: the sweep's trials, whose settings it says when it comes to them, then the cells."""
    trials = []
    for sweep in sweeps.plan(grid):
        for number, seed in itertools.product(range(sweep.settings.trials), sweep.settings.seeds):
            folder = RunFolder(sweep.path(number, seed))
            state = (folder.read_summary() or {}).get("status", "begun" if folder.begun else "new")
            row = {"task": sweep.task, "method": sweep.method, "trial": number, "seed": seed}
            trials.append({**row, "state": str(state), "folder": folder.path})
    cells: list[dict[str, Any]] = [
        {"task": cell.task, "method": cell.method, "seed": cell.config.seed, "state": cell.state()[0], "folder": cell.path}
        for cell in grid.cells()
    ]
    return [*trials, *({**cell, "trial": None} for cell in cells)] if trials else cells


def work_left(grid: Grid, rows: Sequence[Mapping[str, Any]]) -> str:
    """How much of a listing is left to do, in seconds where the budgets are."""
    left = [row for row in rows if row["state"] in ("new", "begun")]
    trial = (grid.sweep.budget if grid.sweep is not None else None) or grid.budget
    budgets = [trial if row.get("trial") is not None else grid.budget for row in left]
    seconds = [budget.seconds for budget in budgets if budget.seconds is not None]
    time = f": {sum(seconds):,.0f} s of steps, one run at a time" if seconds and len(seconds) == len(left) else ""
    return f"{len(left)} of {len(rows)} runs to do{time}"
