"""``hgms demo``: parse, call, print."""

from __future__ import annotations

from pathlib import Path

import click

from hgms.cli import json_option, print_json, print_table
from hgms.demo import demo as demos


@click.command(short_help="Compare two methods with three baselines, in two minutes.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("hgms-demo"),
    show_default=True,
    help="Folder for results.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Runs of each method.",
)
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=demos.CALLS,
    show_default=True,
    help="Oracle calls of each run.",
)
@json_option
def demo(out: Path, seeds: int, calls: int, as_json: bool) -> None:
    """Compare two methods that learn the weights of data sources with three baselines.

    This is the example of the README. All runs have the same budget of oracle calls.
    """

    result = demos.run_demo(out, seeds=seeds, calls=calls, progress=not as_json)
    if as_json:
        print_json(result.as_dict())
        return
    what = "mean ± half width of the 95 % interval, of differences by Holm's rule"
    click.echo(f"{result.calls:,} oracle calls per run, {seeds} seeds; {what} (more with --json)")
    rows = result.table.columns
    print_table(tuple(rows[0]), rows, groups=result.table.groups)
    for line in (*result.table.remarks, *map(str, result.comparison.failures)):
        click.echo(line)
    for path in (*result.pictures, result.folder):
        click.echo(f"  {path}")
