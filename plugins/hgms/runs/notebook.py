"""Results in a notebook: reports.

The report is a separate program that depends on this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tomlkit

from hgms.config.as_table import plain
from hgms.runs.folder import RunFolder
from hgms.runs.own_problem import higher_is_better
from hgms_core import RunInfo
from hgms_core.errors import PluginError


def reporter() -> Any:
    """Return the package behind `hgms report`, which is found in the same way as commands."""
    for program in entry_points(group="hgms.programs", name="report"):
        return program.load()
    raise PluginError(
        "unknown-program",
        "the program `report` is not installed",
        install="pip install --force-reinstall hgms",
    )


def write_run(
    folder: Path,
    info: RunInfo,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    diagnosis: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """Write a run in memory to a folder that `hgms report` can read."""
    config = info.config or {
        "seed": info.seed,
        "task": {"name": info.task},
        "method": {"name": info.method},
        "budget": plain(info.budget),
    }
    directions = {name: higher_is_better(name) for name in summary.get("metrics") or {}}
    known = {name: higher for name, higher in directions.items() if higher is not None}
    place = RunFolder(folder)
    place.create(tomlkit.dumps(config), {"task": {"version": "", "metrics": known}})
    for record in records:
        row = dict(record)
        names = [name for name in ("seconds", "compile_seconds") if name in row]
        clock: dict[str, Any] = {name: row.pop(name) for name in names}
        place.append(row, {"step": row["step"], **clock})
    for measured in diagnosis:
        place.append_diagnosis(measured)
    place.write_summary(summary)
    return folder
