"""``hgms compare``: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hgms.arguments import require
from hgms.cli import (
    json_option,
    plugin_option,
    print_json,
    print_table,
    track_option,
    trust_option,
    words,
)
from hgms.comparison.options import seeds_option
from hgms.config.control_characters import printable
from hgms.executors import executor_options, stated_executor

if TYPE_CHECKING:
    from hgms.plugins import Registry


@click.command(short_help="Compare methods on tasks under one budget.")
@click.argument("grid", required=False, type=click.Path(path_type=Path))
@click.option(
    "--task",
    "tasks",
    multiple=True,
    callback=words,
    metavar="NAME[,NAME]",
    help="Tasks; of a GRID, its labels.",
)
@click.option(
    "--methods",
    "--method",
    multiple=True,
    callback=words,
    metavar="NAME[,NAME]",
    help="Methods; of a GRID, its labels.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help=(
        "task.FIELD or method.FIELD for all, LABEL.FIELD for one, run.FIELD, executor.FIELD. "
        "Repeatable."
    ),
)
@click.option(
    "--budget", metavar="TEXT", help="The same for every run: 60s, 25 steps or 1e5 calls."
)
@seeds_option
@click.option("--out", metavar="FOLDER", help="The folder for run folders.")
@click.option("--metric", help="The metric to compare; by default each task's first.")
@click.option(
    "--reference",
    metavar="LABEL",
    help="The reference of differences. Default: uniform, if named, else the first.",
)
@click.option(
    "--no-baselines",
    is_flag=True,
    help="Do not add the trivial baselines uniform, validation-only and uniform-tilted.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=0),
    metavar="N",
    help=(
        "Processes at a time. Default: 1 for a budget in seconds, else one a core; 0: in this "
        "process."
    ),
)
@executor_options
@click.option("--scale", metavar="NAME", help="A scale of the GRID: apply its table [scale.NAME].")
@click.option("--retry-failed", is_flag=True, help="Run failed cells again.")
@click.option("--dry-run", is_flag=True, help="Check everything and list the cells, without a run.")
@track_option
@trust_option
@plugin_option
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    grid: Path | None,
    tasks: list[str],
    methods: list[str],
    sets: Sequence[str],
    budget: str | None,
    seeds: int | list[int] | None,
    out: str | None,
    metric: str | None,
    reference: str | None,
    no_baselines: bool,
    jobs: int | None,
    executor: str | None,
    address: str | None,
    scale: str | None,
    retry_failed: bool,
    dry_run: bool,
    track: Sequence[str],
    registry: Registry,
    as_json: bool,
) -> None:
    """Compare METHODS on TASKS over seeds under one budget: from a GRID file, from flags, or from
    both.

    \b
    hgms compare grid.toml
    hgms compare --task hyper-cleaning --methods hg-ms,hg-baseline --budget 60s --seeds 5

    Trivial baselines that fit a task are added, unless the grid has baselines = false.

    Finished runs are skipped and interrupted runs resume. The exit status is 1 if a run failed, and
    2 if the grid is invalid.
    """
    from hgms.comparison.grid import FLAGS
    from hgms.comparison.grid_file import load
    from hgms.comparison.run_grid import listing, run_grid
    from hgms.comparison.scale import apply_scale
    from hgms.config.tables import tables_of

    require(
        grid is not None or scale is None,
        "missing-option",
        f"the option requires a GRID file with a table [scale.{scale}]",
        place=(f"--scale {scale}",),
    )
    # order of precedence, lowest first: the file, its scale, the flags
    file = {} if grid is None else tables_of(grid, "grid")
    table = (
        {"task": tasks, "method": methods} if grid is None else apply_scale(file, scale, grid.name)
    )
    flags = {
        "budget": budget,
        "seeds": seeds,
        "metric": metric,
        "reference": reference,
        "baselines": False if no_baselines else None,
    }
    flags = {key: value for key, value in flags.items() if value is not None}
    table = {"baselines": True, **table, **flags}
    where, sets = stated_executor(executor, address, jobs, sets, registry.host)
    sets = [*sets, *track, *([] if out is None else [f"run.out={json.dumps(out)}"])]
    if grid is None:
        loaded = load(table, source=FLAGS, options=flags, sets=sets, registry=registry)
    else:
        loaded = load(
            table,
            source=grid.name,
            options=flags,
            sets=sets,
            tasks=tasks,
            methods=methods,
            registry=registry,
        )
    if dry_run:
        rows = listing(loaded)
        if as_json:
            print_json(rows)
            return
        print_table(tuple(rows[0]), rows)
        left = [row for row in rows if row["state"] in ("new", "begun")]
        click.echo(f"{len(left)} of {len(rows)} runs to do")
        return
    comparison = run_grid(
        loaded,
        jobs=jobs,
        executor=where,
        retry_failed=retry_failed,
        progress=not as_json,
        say=lambda line: click.echo(line, err=True),
    )
    if as_json:
        print_json(comparison.as_dict())
    else:
        for results in comparison.tables:
            click.echo(printable(f"{results.task}: {comparison.heading}"))
            print_table(tuple(results.columns[0]), results.columns, groups=results.groups)
        for line in comparison.remarks:
            click.echo(printable(line))
        click.echo(f"  {loaded.out}")
    ctx.exit(0 if comparison.complete else 1)
