"""``hgms compat`` and ``hgms check-gradient``: what fits what, and whether a hypergradient is right. Parse, call, print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import click

from hgms_core import compat as fitting
from hgms_core import plugins, registry
from hgms_core.errors import ConfigError, HgmsError
from hgms_core.protocols import Method, Task
from hgms_core.terminal import json_option, plugin_option, print_json, print_table


@click.command()
@plugin_option
@json_option
def compat(files: Sequence[str], as_json: bool) -> None:
    """Which methods fit which tasks, known before anything runs.

    ok: the task has all that the method and its parts need. no: it lacks what is listed below the table. ?: the task makes no
    promise, or the method cannot be built without a configuration.
    """
    plugins.host(files)
    tasks = {item.name: item.target for item in registry.default().components("task")}
    rows = [row for item in registry.default().components("method") for row in _cells(item.name, tasks)]
    if as_json:
        print_json(rows)
        return
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        table.setdefault(row["method"], {"method": row["method"]})[row["task"]] = {True: "ok", False: "no", None: "?"}[
            row["fits"]
        ]
    print_table(("method", *tasks), list(table.values()))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["why"]:
            reasons.setdefault(f"{row['method']}: {row['why']}", []).append(row["task"])
    for why, names in reasons.items():
        click.echo(f"  {why} ({'every task' if len(names) == len(tasks) else ', '.join(names)})")


def _cells(name: str, tasks: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One method against every task: whether it ``fits`` (null: not known) and ``why`` not."""
    for task, target in tasks.items():
        try:
            method = built(name, Method, traits=frozenset(getattr(target, "traits", ())))
        except HgmsError:
            method = None
        lacking = fitting.missing(method, target) if method is not None else None
        why = fitting.wanting(lacking) if lacking else ""
        if lacking is None:
            nothing = method is None
            why = "it cannot be built from its defaults alone" if nothing else "the task says nothing about its problems"
        yield {"method": name, "task": task, "fits": None if lacking is None else not lacking, "why": why}


def built(name: str, protocol: Any, fields: Sequence[str] = (), traits: frozenset[str] = frozenset()) -> Any:
    """The task or method called ``name``, with ``task.FIELD=VALUE`` or ``method.FIELD=VALUE`` laid over its defaults (a
    method's on a task with ``traits``)."""
    from hgms_core import config, structure

    kind = structure.PROTOCOLS[protocol].name
    table: dict[str, Any] = {kind: {"name": name}}
    places = [config.lay(table, assignment) for assignment in fields]
    try:
        return structure.structured(table[kind], protocol, registry.default(), traits)
    except structure.Invalid as invalid:
        raise ConfigError(structure.Invalid(*invalid.below(kind)).render("the command line", tuple(places))) from None


@click.command("check-gradient")
@click.argument("task")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="task.FIELD or method.FIELD. Repeatable.")
@click.option("--method", metavar="NAME", help="Also compare the estimator of this method, at the solved lower level.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--points", type=click.IntRange(min=1), default=3, show_default=True, help="θ0, and others around it.")
@click.option(
    "--directions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="At each point; if θ has no more numbers, all of them.",
)
@click.option(
    "--tolerance", type=click.FloatRange(min=0, min_open=True), default=1e-4, show_default=True, help="Largest relative error."
)
@plugin_option
@json_option
@click.pass_context
def check_gradient(
    ctx: click.Context, task: str, sets: Sequence[str], method: str | None, seed: int, points: int, directions: int,
    tolerance: float, files: Sequence[str], as_json: bool,
) -> None:  # fmt: skip
    """Is the hypergradient of TASK the slope of its re-solved lower level?

    At a few θ the lower level is solved to high accuracy in float64 (by the task's closed form, else from x0), the implicit
    hypergradient is computed there without approximation, and compared with central differences of f at the re-solved lower
    level. Small problems only: shrink the task with --set task.FIELD=VALUE. Leaves with 1 if they differ, or if no point could
    be checked.

    \b
    hgms check-gradient quadratic
    hgms check-gradient hyper-cleaning --set task.train_size=50 --set task.hidden=3 --set task.omega=0.01
    """
    plugins.host(files)
    for assignment in sets:
        if assignment.split(".")[0] not in ("task", "method") or (assignment.startswith("method.") and not method):
            raise ConfigError(f"--set {assignment}: write task.FIELD=VALUE" + (" or method.FIELD=VALUE" if method else ""))
    made = built(task, Task, [one for one in sets if one.startswith("task.")])
    traits = frozenset(getattr(made, "traits", ()))
    other = built(method, Method, [one for one in sets if one.startswith("method.")], traits) if method else None
    from hgms_core.gradient_check import check_task

    report = check_task(made, seed=seed, points=points, directions=directions, tolerance=tolerance, method=other)
    if as_json:
        print_json(attrs.asdict(report))
    else:
        print_table(
            ("point", "direction", "hypergradient", "finite difference", "relative error", "verdict"),
            [
                {
                    "point": row.point,
                    "direction": row.direction,
                    "hypergradient": f"{row.hypergradient:.9g}",
                    "finite difference": f"{row.difference:.9g}",
                    "relative error": f"{row.error:.1e}",
                    "verdict": row.verdict,
                }
                for row in report.rows
            ],
        )
        for note in report.notes:
            click.echo(f"  {note}")
        click.echo(report.verdict)
    ctx.exit(0 if report.agrees else 1)
