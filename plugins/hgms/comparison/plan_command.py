"""``hgms plan``: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hgms.cli import json_option, plugin_option, print_json, print_table, trust_option
from hgms.comparison.options import seeds_option
from hgms.config.control_characters import printable
from hgms_core import ConfigError

if TYPE_CHECKING:
    from hgms.plugins import Registry


def _counts(_context: click.Context, _option: click.Parameter, text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > 100_000:
        raise ConfigError(
            "wrong-value",
            f"{text!r} must be numbers of workers between 1 and 100,000",
            place=(f"--workers {text}",),
            hint="use numbers separated by commas, such as --workers 2,8,64",
        )
    return counts


@click.command("plan", short_help="Estimate the cost of a grid before its runs.")
@click.argument("grid", type=click.Path(path_type=Path))
@click.option(
    "--methods", metavar="NAME[,NAME]", help="Labels of the grid's methods. Default: all."
)
@seeds_option
@click.option("--scale", metavar="NAME", help="A scale of the GRID.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the grid. Repeatable.",
)
@click.option(
    "--out", metavar="FOLDER", help="The folder for its run folders. Finished runs are not counted."
)
@click.option(
    "--workers",
    metavar="N[,N]",
    default="1,2,8,64,512",
    show_default=True,
    callback=_counts,
    help="Estimate its time on these numbers of workers.",
)
@trust_option
@plugin_option
@json_option
def plan(
    grid: Path,
    methods: str | None,
    seeds: int | list[int] | None,
    scale: str | None,
    sets: Sequence[str],
    out: str | None,
    workers: list[int],
    registry: Registry,
    as_json: bool,
) -> None:
    """Measure three outer steps per cell of GRID and estimate the cost of the whole grid: seconds,
    memory, disk, and the duration with several numbers of workers.

    \b
    hgms plan grid.toml --workers 2,8,64

    Steps are measured uncompiled, with no other run on this machine. Compiled steps take less time;
    runs that share a machine take more.
    """
    from hgms.comparison.grid_file import load
    from hgms.comparison.planning import plan as planned
    from hgms.comparison.scale import apply_scale
    from hgms.config.tables import tables_of
    from hgms.executors import Local

    table = apply_scale(tables_of(grid, "grid"), scale, grid.name)
    table = {"baselines": True, **table}
    table |= {} if seeds is None else {"seeds": seeds}
    labels = [word.strip() for word in (methods or "").split(",") if word.strip()]
    sets = [*sets, *([] if out is None else [f"run.out={out}"])]
    loaded = load(table, source=grid.name, sets=sets, methods=labels, registry=registry)
    executor = Local(jobs=1, fresh=True)  # a process per run: memory is measured per run
    try:
        result = planned(loaded, executor, lambda line: click.echo(printable(line), err=True))
    finally:
        executor.close()
    numbers = result.as_dict(workers)
    if as_json:
        print_json(numbers)
        return
    rows = result.rows()
    print_table(tuple(rows[0]), rows)
    for (task, method), cost in result.costs.items():
        if cost.error:
            click.echo(printable(f"  not measured: {task}, {method}: {cost.error.lines()[0]}"))
    click.echo(
        f"{numbers['runs']} runs to do: {_span(numbers['seconds'])} one at a time, the longest "
        f"{_span(numbers['longest'])}; {numbers['bytes_on_disk'] / 1e6:,.1f} MB on disk"
    )
    for count, seconds in numbers["workers"].items():
        if int(count) <= max(numbers["runs"], workers[0]):  # more workers than runs would idle
            click.echo(f"  on {int(count):,} worker{'s' * (int(count) > 1)}: {_span(seconds)}")


def _span(seconds: float) -> str:
    """Format a duration with a readable unit."""
    for size, unit in ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
