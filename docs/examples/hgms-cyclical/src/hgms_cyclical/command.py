"""`hgms cycles`: the share of steps per cycle, from the `cycles.jsonl` of finished and unfinished
runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from attrs import define, field, frozen

from hgms.cli import json_option, print_json, print_table
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError
from hgms_cyclical.observer import FILE


@frozen(kw_only=True)
class Record:
    """One run's `cycles.jsonl`."""

    folder: Path
    task: str
    method: str
    seed: int
    cycles: int
    rows: tuple[dict[str, Any], ...]


@define
class Group:
    """The runs of one task and method with equally many cycles, over their seeds."""

    task: str
    method: str
    cycles: int
    runs: list[Record] = field(factory=list)

    @property
    def steps(self) -> int:
        return sum(len(run.rows) for run in self.runs)

    @property
    def shares(self) -> list[float | None]:
        """Return the share of outer steps that each cycle won; ``None`` without steps."""
        won = [row["cycle"] for run in self.runs for row in run.rows]
        return [won.count(cycle) / len(won) if won else None for cycle in range(1, self.cycles + 1)]

    @property
    def mean_gap(self) -> float | None:
        """Return the mean gap of the best two upper values, over steps with finite gaps."""
        gaps = [row["gap"] for run in self.runs for row in run.rows if row["gap"] is not None]
        return sum(gaps) / len(gaps) if gaps else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "method": self.method,
            "runs": [str(run.folder) for run in self.runs],
            "outer_steps": self.steps,
            "shares": self.shares,
            "mean_gap": self.mean_gap,
        }


def read(path: Path) -> Record:
    """Read a record.

    Raises CheckpointError for a damaged file; an incomplete last line is skipped.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    number = 0
    try:
        rows = []
        for number, line in enumerate(lines, start=1):  # noqa: B007
            rows.append(json.loads(line))
        head = rows[0]
        record = Record(
            folder=path.parent,
            task=str(head["task"]),
            method=str(head["method"]),
            seed=int(head["seed"]),
            cycles=int(head["cycles"]),
            rows=tuple(
                {"step": int(row["step"]), "cycle": int(row["cycle"]), "gap": row["gap"]}
                for row in rows[1:]
            ),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            "damaged-file",
            f"the line is not a record of {FILE} ({type(error).__name__}: {error})",
            place=(str(path), max(number, 1)),
            hint="restore the file, or remove it: the run does not need it",
        ) from None
    return record


def groups(folders: Iterable[Path]) -> list[Group]:
    """Return all runs with a record of their cycles below ``folders``, grouped, in the order of
    paths.

    Trials of a pilot sweep are excluded. Raises ConfigError for a missing folder, or a folder
    without such runs.
    """
    by_run: dict[tuple[str, str, int], Group] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                "missing-file",
                "the folder does not exist",
                place=(str(folder),),
                hint="use run folders, or a directory with run folders, such as runs",
            )
        names = []
        for place, _, files in os.walk(folder):
            names += [Path(place, name) for name in files]
        records = [read(path) for path in sorted(names) if path.name == FILE]
        if not records:
            runs = sum(path.name == "steps.jsonl" for path in names)
            what = (
                f"the {runs} runs in the folder have no {FILE}"
                if runs
                else "the folder contains no runs"
            )
            raise ConfigError(
                "no-runs",
                what,
                place=(str(folder),),
                hint=f"install hgms-cyclical, which writes {FILE} for runs of methods with "
                'generator = { name = "cyclical-langevin" }',
            )
        for record in records:
            key = (record.task, record.method, record.cycles)
            by_run.setdefault(key, Group(*key)).runs.append(record)
    return list(by_run.values())


def row(group: Group, columns: int) -> dict[str, str]:
    """Return a line of the table: shares in per cent, one column per cycle."""
    shares = ["" if share is None else f"{share:.0%}" for share in group.shares] + [""] * (
        columns - group.cycles
    )
    gap = "" if group.mean_gap is None else f"{group.mean_gap:.3g}"
    counts = {"runs": str(len(group.runs)), "steps": str(group.steps)}
    cells = {f"cycle {number}": share for number, share in enumerate(shares, start=1)}
    return {"task": group.task, "method": group.method, **counts, **cells, "mean gap": gap}


# start: command
@click.command(short_help="Which cycle of cyclical-langevin won.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw the shares into this file (.png, .svg, .pdf).",
)
@json_option
def cycles(runs: Sequence[Path], plot: Path | None, as_json: bool) -> None:
    """Show the share of outer steps per cycle of `cyclical-langevin`, by the selected candidate.

    RUNS are run folders, or directories with run folders; seeds of one method are combined.
    """
    counted = groups(runs)
    if plot is not None:
        from hgms_cyclical.picture import draw

        draw(counted, plot)
    if as_json:
        print_json([group.as_dict() for group in counted])
        return
    rows = [row(group, max(other.cycles for other in counted)) for group in counted]
    print_table(tuple(rows[0]), rows)
    if plot is not None:
        click.echo(f"  {plot}")


# end: command
