"""``hgms mix surface``: parse arguments, call functions, print results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hgms.cli import json_option, plugin_option, print_json, trust_option
from hgms.executors import Executor, Local, executor_options, stated_executor, to_stderr
from hgms.plugins import Registry

FILE = click.Path(path_type=Path)


@click.command(short_help="Fit a mixture with error bars from many short runs.")
@click.argument("config", type=FILE, required=False)
@click.option(
    "--ratios",
    type=FILE,
    help="Fit finished runs instead: mixtures in the format of olmix's ratios.csv.",
)
@click.option(
    "--metrics",
    type=FILE,
    help="… and their metrics, in the format of olmix's metrics.csv. Lower is better.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the file. Repeatable.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Replace the seed of the file.")
@click.option("--out", metavar="FOLDER", help="The folder for results.")
@click.option(
    "--device", metavar="NAME", help="cpu, cuda or cuda:N. The same as --set run.device=NAME."
)
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
    config: Path | None,
    ratios: Path | None,
    metrics: Path | None,
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
    hgms mix surface --ratios ratios.csv --metrics metrics.csv
        fit existing runs
    """
    where, sets = stated_executor(executor, address, jobs, sets, registry.host)
    if where is None and jobs is not None:
        where = Local(jobs=jobs)
    if (config is None) == (ratios is None and metrics is None):
        raise click.UsageError("give either CONFIG, or --ratios and --metrics")
    if config is not None:
        report = _of_runs(
            config, sets, as_json=as_json, executor=where, registry=registry, **choices
        )
    elif where is not None or choices["device"] is not None:
        raise click.UsageError(
            "--device, --jobs and --executor are of no use without CONFIG: nothing is trained"
        )
    else:
        report = _of_files(ratios, metrics, sets, registry, choices, say=None if as_json else _show)
    if as_json:
        print_json(report)


def _of_runs(
    config: Path, sets: Sequence[str], *, as_json: bool, executor: Executor | None, **choices: Any
) -> dict[str, Any]:
    """Run a design and return its report."""
    from hgms_mix.surface.train import load, run_surface

    plan = load(config, sets, **choices)
    return run_surface(
        plan, say=to_stderr, show=None if as_json else _show, executor=executor, bars=not as_json
    )


def _of_files(
    ratios: Path | None,
    metrics: Path | None,
    sets: Sequence[str],
    registry: Registry,
    choices: Any,
    *,
    say: Any,
) -> dict[str, Any]:
    """Return the report of finished runs in tables."""
    from hgms_mix.surface.learn import learn
    from hgms_mix.surface.report import settings_laid, write
    from hgms_mix.surface.tables import read_runs

    if ratios is None or metrics is None:
        raise click.UsageError("--ratios and --metrics go together")
    settings = settings_laid(sets, registry)
    findings = learn(read_runs(ratios, metrics, to_stderr), settings, seed=choices["seed"] or 0)
    return write(findings, Path(choices["out"] or "surface"), say=say)


def _show(findings: Any, report: dict[str, Any]) -> None:
    from hgms_mix.surface.words import show

    show(findings, report)
