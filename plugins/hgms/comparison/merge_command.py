"""``hgms merge``: parse, call, print."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from hgms.cli import json_option, print_json, print_table
from hgms.config.control_characters import printable


@click.command(short_help="Join result folders of several machines.")
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--dry-run", is_flag=True, help="Check everything and list the changes, without making them."
)
@json_option
def merge(target: Path, sources: tuple[Path, ...], dry_run: bool, as_json: bool) -> None:
    """Merge the runs below SOURCES into TARGET.

    \b
    hgms merge runs from-node-1 from-node-2

    If several folders contain the same run, a finished run takes precedence. Otherwise the run that
    has progressed further is used. Different results of one run are an error, and TARGET is not
    changed. SOURCES are never changed.
    """
    from hgms.comparison.merge import carry_out, plan, sweeps

    steps = plan(sources, target)
    tables = sweeps(sources, target)
    rows = [
        {"run": str(step.target), "what": step.what, "from": str(step.source)} for step in steps
    ]
    if not dry_run:
        carry_out(steps, tables)
    if as_json:
        print_json(rows)
        return
    if dry_run and rows:
        print_table(("what", "run", "from"), rows)
    counts = Counter(step.what for step in steps)
    would = "would be " if dry_run else ""
    words = {"copy": "copied", "replace": "replaced by what has come further", "keep": "kept"}
    told = [f"{counts[what]} {would}{word}" for what, word in words.items() if counts[what]]
    click.echo(printable(f"{target}: {', '.join(told) or 'there are no runs in these folders'}"))
