"""``hgms mix surface``: parse arguments, call functions, print results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hgms.cli import (
    device_option,
    json_option,
    plugin_option,
    print_json,
    seed_option,
    set_option,
    trust_option,
)
from hgms.executors import Local, executor_options, stated_executor, to_stderr
from hgms.plugins import Registry

FILE = click.Path(path_type=Path)


@click.command(short_help="Fit a mixture with error bars from many short runs.")
@click.argument("config", type=FILE)
@set_option
@seed_option
@click.option("--out", metavar="FOLDER", help="The folder for results.")
@device_option
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Concurrent processes.  [default: one run at a time, in this process]",
)
@executor_options
@trust_option
@plugin_option
@json_option
def surface(
    config: Path,
    sets: Sequence[str],
    as_json: bool,
    registry: Registry,
    executor: str | None,
    address: str | None,
    jobs: int | None,
    **choices: Any,
) -> None:
    """Fine-tune on a design of mixtures, fit a response surface to the validation losses, and
    recommend a mixture. The report contains an interval for the gain over the prior, the region of
    the best mixture, and a picture.

    \b
    hgms mix surface mix.toml
        train and fit; resume if it was interrupted
    """
    from hgms_mix.surface import words
    from hgms_mix.surface.train import load, run_surface

    where, sets = stated_executor(executor, address, jobs, sets, registry.host)
    if where is None and jobs is not None:
        where = Local(jobs=jobs)
    plan = load(config, sets, registry=registry, **choices)
    show = None if as_json else words.show
    report = run_surface(plan, say=to_stderr, show=show, executor=where, bars=not as_json)
    if as_json:
        print_json(report)
