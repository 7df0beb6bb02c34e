"""``hgms mix compare``: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hgms.cli import json_option, plugin_option, print_json, trust_option, words
from hgms.comparison import seeds_option
from hgms.executors import Local, executor_options, stated_executor


@click.command(short_help="Compare the models tuned on the mixtures of a grid.")
@click.argument("grid", type=click.Path(path_type=Path))
@click.option(
    "--methods",
    "--method",
    multiple=True,
    callback=words,
    metavar="NAME[,NAME]",
    help="Labels of the grid's methods. Default: all.",
)
@seeds_option
@click.option(
    "--reference",
    metavar="LABEL",
    help="The reference of differences. Default: the grid's, else uniform.",
)
@click.option("--out", metavar="FOLDER", help="The folder for mix folders.")
@click.option("--scale", metavar="NAME", help="A scale of the GRID.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of every mix. Repeatable.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Concurrent mixes, one process each.",
)
@executor_options
@trust_option
@plugin_option
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    grid: Path,
    methods: Sequence[str],
    seeds: int | list[int] | None,
    reference: str | None,
    out: str | None,
    scale: str | None,
    sets: Sequence[str],
    jobs: int,
    executor: str | None,
    address: str | None,
    registry: Any,
    as_json: bool,
) -> None:
    """Run the mix of every method of GRID, over its seeds, and compare the tuned models by their
    losses on the test sets.

    \b
    hgms mix compare grid.toml --seeds 5 --jobs 2

    Each mix is the same as `hgms mix GRID --method LABEL --seed N`: finished parts are skipped,
    interrupted parts resume. The exit status is 1 if a mix failed, 2 if the grid is invalid.
    """
    from hgms_mix.stages.compare.mixes import Contest, run_contest

    where, sets = stated_executor(executor, address, jobs, sets, registry.host)
    contest = Contest.of(
        grid, methods, seeds, reference, out=out, scale=scale, sets=sets, registry=registry
    )
    outcome = run_contest(contest, where or Local(jobs=jobs, fresh=True), bars=not as_json)
    if as_json:
        print_json(outcome.as_dict())
    else:
        outcome.print()
    if outcome.failures:
        ctx.exit(1)
