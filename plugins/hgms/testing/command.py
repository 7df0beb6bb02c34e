"""The commands ``hgms check`` and ``hgms check-gradient``: parse, run, print."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import attrs
import click

from hgms.cli import json_option, plugin_option, print_json, print_table
from hgms.plugins import Registry
from hgms.runs import build_component
from hgms.testing import check as checks
from hgms.testing.gradient_check import check_task
from hgms_core import ConfigError, Task

_COUNT = click.IntRange(min=1)


@click.command(short_help="Check a class as a component.")
@click.argument("spec", metavar="MODULE:CLASS")
@plugin_option
@json_option
@click.pass_context
def check(ctx: click.Context, spec: str, registry: Registry, as_json: bool) -> None:
    """Check whether a class is a valid component. MODULE may be a file: ./my_solver.py:MySolver.

    A composition is named in the same way, or by its registered name, and the checks of methods run
    on it. Parts that its module registers are available. MODULE:CLASS may also be a registered
    name: cg, hg-ms; or generator:soba if two kinds register the same name.
    """

    kind, target, registry = checks.target_of(spec, registry)
    with contextlib.redirect_stdout(sys.stderr):  # output of a component must not corrupt --json
        results = list(checks.check(target, kind, registry))
    failures = sum(bool(result.fault) for result in results)
    if as_json:
        print_json(
            {
                "class": spec,
                "kind": kind.name,
                "results": [attrs.asdict(result) for result in results],
            }
        )
    else:
        click.echo(f"{spec}: {kind.with_article}")
        for result in results:
            what = result.fault
            label = "FAIL" if result.fault else "ok  "
            if result.excuse:
                label = "but "
                what = f"expected to fail: {result.excuse}"
            if result.skipped:
                label = "-   "
                what = f"skipped: {result.skipped}"
            click.echo(f"  {label} {result.check}{': ' + what if what else ''}")
            if result.expected:
                click.echo(f"       expected: {result.expected}")
        counts = {
            "failed": failures,
            "expected to fail": sum(bool(result.excuse) for result in results),
            "skipped": sum(bool(result.skipped) for result in results),
        }
        passed = len(results) - sum(counts.values())
        others = [f"{count} {how}" for how, count in counts.items() if count]
        click.echo(", ".join([f"{passed} passed", *others]))
    ctx.exit(1 if failures else 0)


@click.command("check-gradient", short_help="Check a task's hypergradient by differences of F.")
@click.argument("task")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="task.FIELD. Repeatable.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--points",
    type=_COUNT,
    default=3,
    show_default=True,
    help="The number of points: θ0, and others near it.",
)
@click.option(
    "--directions",
    type=_COUNT,
    default=5,
    show_default=True,
    help="Coordinates per point; at most all of θ.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=1e-4,
    show_default=True,
    help="Largest relative error.",
)
@plugin_option
@json_option
@click.pass_context
def check_gradient(
    ctx: click.Context,
    task: str,
    sets: Sequence[str],
    seed: int,
    points: int,
    directions: int,
    tolerance: float,
    registry: Registry,
    as_json: bool,
) -> None:
    """Compare the hypergradient of TASK with differences of its re-solved lower level.

    At a few θ the lower level is solved to high accuracy in float64, by the closed form of the
    task, else from x0. There the implicit hypergradient is computed without approximation and
    compared with central differences of f at the re-solved lower level. Small problems only: reduce
    the task with --set task.FIELD=VALUE. The exit code is 1 if they differ, or if no point could be
    checked.

    \b
    hgms check-gradient quadratic
    hgms check-gradient hyper-cleaning --set task.train_size=50 --set task.hidden=3
    """
    for assignment in sets:
        if not assignment.startswith("task."):
            raise ConfigError(
                "unknown-option",
                f"{assignment.partition('=')[0]!r} is not an option of the task",
                place=(f"--set {assignment}",),
                hint="use task.FIELD=VALUE",
            )
    instance = build_component(task, Task, sets, registry=registry)
    report = check_task(
        instance, seed=seed, points=points, directions=directions, tolerance=tolerance
    )
    if as_json:
        print_json(attrs.asdict(report))
    else:
        columns = (
            "point",
            "direction",
            "hypergradient",
            "finite difference",
            "relative error",
            "verdict",
        )
        cells = [
            (
                row.point,
                row.direction,
                f"{row.hypergradient:.9g}",
                f"{row.difference:.9g}",
                f"{row.error:.1e}",
                row.verdict,
            )
            for row in report.rows
        ]
        print_table(columns, [dict(zip(columns, row, strict=True)) for row in cells])
        for note in report.notes:
            click.echo(f"  {note}")
        click.echo(report.verdict)
    ctx.exit(0 if report.agrees else 1)
