"""``hgms compare``: parses, calls, prints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hgms_cli import json_option, plugin_option, print_json, print_table, printable, track_option, trust_option
from hgms_core import ConfigError

if TYPE_CHECKING:
    from hgms_compare.grid import Grid
    from hgms_core.registry import Registry


def _words(_context: click.Context, _option: click.Parameter, value: Sequence[str]) -> list[str]:
    """Repeatable, and with commas."""
    return [word.strip() for each in value for word in each.split(",") if word.strip()]


def _seeds(_context: click.Context, _option: click.Parameter, value: str | None) -> int | list[int] | None:
    """A count (``5``), a list (``0,1,7``) or a range (``10-14``)."""
    from hgms_compare.grid import MOST_SEEDS

    if value is None:
        return None
    try:
        if "," not in value and "-" not in value:
            return int(value)
        found: list[int] = []
        for part in value.split(","):
            first, dash, last = part.partition("-")
            numbers = range(int(first), int(last if dash else first) + 1)
            if not numbers:
                raise ValueError
            if len(found) + numbers.stop - numbers.start > MOST_SEEDS:
                raise click.BadParameter(f"at most {MOST_SEEDS:,} seeds, not {value!r}")
            found += numbers
    except ValueError:
        raise click.BadParameter(f"write a count (5), a list (0,1,7) or a range (10-14), not {value!r}") from None
    return found


def _rows(grid: Grid) -> list[dict[str, Any]]:
    """Every run of the grid: the sweep's trials, whose settings it says when it comes to them, then the cells."""
    from hgms_compare import sweep
    from hgms_compare.compare import state_of
    from hgms_run import RunFolder

    rows = []
    for one in sweep.plan(grid):
        for number, seed in itertools.product(range(one.settings.trials), one.settings.seeds):
            folder = RunFolder(one.path(number, seed))
            summary = folder.read_summary() or {}
            state = str(summary.get("status", "begun" if folder.begun else "new"))
            rows.append(
                {"task": one.task, "method": one.method, "trial": number, "seed": seed, "state": state, "folder": folder.path}
            )
    cells = [
        {"task": cell.task, "method": cell.method, "seed": cell.config.seed, "state": state_of(cell)[0], "folder": cell.path}
        for cell in grid.cells()
    ]
    return [*rows, *({**cell, "trial": None} for cell in cells)] if rows else cells


def _work(grid: Grid, rows: Sequence[Mapping[str, Any]]) -> str:
    """How much is left to do, in seconds where the budgets are."""
    left = [row for row in rows if row["state"] in ("new", "begun")]
    trial = (grid.sweep.budget if grid.sweep is not None else None) or grid.budget
    seconds = [(trial if row.get("trial") is not None else grid.budget).seconds for row in left]
    known = [one for one in seconds if one is not None]
    time = f": {sum(known):,.0f} s of steps, one run at a time" if known and len(known) == len(left) else ""
    return f"{len(left)} of {len(rows)} runs to do{time}"


@click.command()
@click.argument("grid", required=False, type=click.Path(path_type=Path))
@click.option("--task", "tasks", multiple=True, callback=_words, metavar="NAME[,NAME]", help="Tasks; of a GRID, its labels.")
@click.option(
    "--methods", "--method", multiple=True, callback=_words, metavar="NAME[,NAME]", help="Methods; of a GRID, its labels."
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE",
    help="task.FIELD or method.FIELD for all, LABEL.FIELD for one, run.FIELD. Repeatable.",
)  # fmt: skip
@click.option("--budget", metavar="TEXT", help="The same for every run: 60s, 25 steps or 1e5 calls.")
@click.option("--seeds", callback=_seeds, metavar="N|LIST", help="A count, a list (0,1,7) or a range (10-14).")
@click.option("--out", metavar="FOLDER", help="Where run folders go.")
@click.option("--metric", help="What to compare by; by default each task's first metric.")
@click.option("--reference", metavar="LABEL", help="What differences are taken to. Default: uniform, if named, else the first.")
@click.option("--jobs", type=click.IntRange(min=0), metavar="N",
              help="Processes at a time. Default: 1 for a budget in seconds, else one a core; 0: in this process.")  # fmt: skip
@click.option("--scale", metavar="NAME", help="A scale of the GRID: its table [scale.NAME] is laid over it.")
@click.option("--fresh", is_flag=True, help="A new process for every run (slower; memory is then each run's own everywhere).")
@click.option("--retry-failed", is_flag=True, help="Run what failed before once more.")
@click.option("--dry-run", is_flag=True, help="Check everything, list the cells, run nothing.")
@track_option
@trust_option
@plugin_option
@json_option
@click.pass_context
def compare(
    ctx: click.Context, grid: Path | None, tasks: list[str], methods: list[str], sets: Sequence[str], budget: str | None,
    seeds: int | list[int] | None, out: str | None, metric: str | None, reference: str | None, jobs: int | None,
    scale: str | None, fresh: bool,
    retry_failed: bool, dry_run: bool, track: Sequence[str], registry: Registry, as_json: bool,
) -> None:  # fmt: skip
    """Compare METHODS on TASKS over seeds under one budget: from a GRID file, from flags, or from both.

    \b
    hgms compare grid.toml
    hgms compare --task hyper-cleaning --methods hg-ms,hg-baseline --budget 60s --seeds 5

    What is finished is not run again, what was broken off goes on. Leaves with 1 if a run failed, 2 if the grid is wrong.
    """
    from hgms_compare.compare import run_grid
    from hgms_compare.grid_file import FLAGS, load
    from hgms_compare.scale import scaled
    from hgms_run import tables_of

    over = {"budget": budget, "seeds": seeds, "metric": metric, "reference": reference}
    # the file, then its scale, then the flags, which have the last word
    table = {"task": tasks, "method": methods} if grid is None else scaled(tables_of(grid, "grid"), scale, grid.name)
    table |= {key: value for key, value in over.items() if value is not None}
    sets = [*sets, *track]
    if out is not None:
        sets = [*sets, f"run.out={json.dumps(out)}"]
    if grid is None and scale is not None:
        raise ConfigError(f"--scale {scale} chooses a table [scale.{scale}] of a GRID file; none is given")
    if grid is None:
        loaded = load(table, source=FLAGS, sets=sets, registry=registry)
    else:
        loaded = load(table, source=grid.name, sets=sets, tasks=tasks, methods=methods, registry=registry)
    if dry_run:
        rows = _rows(loaded)
        if as_json:
            print_json(rows)
            return
        print_table(tuple(rows[0]), rows)
        click.echo(_work(loaded, rows))
        return
    found = run_grid(
        loaded, jobs=jobs, retry_failed=retry_failed, fresh=fresh, progress=not as_json,
        say=lambda line: click.echo(line, err=True),
    )  # fmt: skip
    if as_json:
        print_json(found.as_dict())
    else:
        for one in found.tables:
            click.echo(printable(f"{one.task}: {found.heading}"))
            columns = one.columns
            print_table(tuple(columns[0]), columns)
        for line in found.remarks:
            click.echo(printable(line))
        click.echo(f"  {loaded.out}")
    ctx.exit(0 if found.complete else 1)
