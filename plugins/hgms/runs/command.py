"""The commands ``hgms run`` and ``hgms describe``.

This module parses the arguments, calls the functions and prints the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from hgms.cli import (
    json_option,
    kind_called,
    plugin_option,
    print_json,
    set_option,
    track_option,
    trust_option,
)
from hgms.config import Budget
from hgms.plugins import Component, Registry
from hgms.runs import describe as descriptions
from hgms.runs.command_line import load
from hgms.runs.launch import run_config
from hgms.runs.progress import Progress
from hgms_core import ConfigError
from hgms_core.errors import unknown_name


@click.command(short_help="Describe one component.")
@click.argument("words", metavar="[KIND] NAME", nargs=-1, required=True)
@plugin_option
@json_option
def describe(words: Sequence[str], registry: Registry, as_json: bool) -> None:
    """Show one component: documentation, and fields with defaults, types and ranges. For a task,
    also show its metrics, its traits and the sizes of θ and x.

    KIND is optional if only one component has the NAME.
    """
    if len(words) > 2:
        raise click.UsageError(f"one KIND and one NAME, not {len(words)} words")
    *kind, name = words
    component = (
        registry.get(kind_called(kind[0]).name, name) if kind else _component(registry, name)
    )
    known = descriptions.description(component, registry)
    if as_json:
        print_json(known)
    else:
        descriptions.show(component, known)


def _component(registry: Registry, name: str) -> Component:
    """Return the only component of that name, of any kind."""
    known = [item for item in registry.components() if item.kind.label]
    hits = [item for item in known if item.name == name]
    if not hits:
        raise unknown_name("component", name, {item.name for item in known}, ("NAME",))
    if len(hits) > 1:
        kinds = " or ".join(f"`hgms describe {item.kind.name} {name}`" for item in hits)
        raise ConfigError(
            "ambiguous-name",
            f"{len(hits)} components have the name {name!r}",
            place=("NAME",),
            hint=f"use {kinds}",
        )
    return hits[0]


@click.command(short_help="Run a configuration file.")
@click.argument("config", type=click.Path(path_type=Path))
@set_option
@click.option("--seed", type=int, help="Replace the seed of the file.")
@click.option("--out", help="The folder for run folders.")
@click.option("--resume", is_flag=True, help="Resume from the run's checkpoint.")
@track_option
@trust_option
@plugin_option
@json_option
def run(
    config: Path,
    sets: Sequence[str],
    seed: int | None,
    out: str | None,
    resume: bool,
    track: Sequence[str],
    registry: Registry,
    as_json: bool,
) -> None:
    """Run the configuration in the CONFIG file, and store the results in a run folder."""
    loaded = load(config, [*sets, *track], seed=seed, out=out, registry=registry)
    with Progress(enabled=not as_json) as view:
        result = run_config(loaded, resume=resume, watch=view.watch)
    summary = {**result.summary, "seconds": result.seconds, "folder": str(result.info.folder)}
    if as_json:
        print_json(
            {
                **summary,
                **({"warnings": result.diagnosis.warnings} if result.diagnosis.rows else {}),
            }
        )
        return
    click.echo(
        f"{summary['task']}, {summary['method']}, seed {summary['seed']}: {summary['status']}"
    )
    for name, value in (summary.get("metrics") or {}).items():
        click.echo(f"  {name}: " + ("not finite" if value is None else f"{value:.6g}"))
    for remark in summary.get("remarks") or []:
        click.echo(f"  note: {remark}")
    for warning in result.diagnosis.warnings:
        click.echo(f"  warning: {warning}")
    for phrase in result.diagnosis.missing_measures:
        click.echo(f"  not measured: {phrase}")
    calls = summary.get("oracle_calls")
    steps = Budget(outer_steps=max(1, summary["outer_steps"]))
    click.echo(f"  {steps}, {result.seconds:.1f} s" + (f", {calls} oracle calls" if calls else ""))
    if result.diagnosis.rows:
        calls = sum(row.get("oracle_calls") or 0 for row in result.diagnosis)
        took = sum(row.get("seconds") or 0.0 for row in result.diagnosis)
        click.echo(
            f"  diagnosed {Budget(outer_steps=len(result.diagnosis))}, outside the budget: "
            f"{took:.1f} s, {calls} oracle calls"
        )
    for remark in result.execution.remarks() if result.execution is not None else []:
        click.echo(f"  {remark}")
    click.echo(f"  {summary['folder']}")
