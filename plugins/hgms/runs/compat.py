"""``hgms compat``: compatibility of methods and tasks, as rows and as a table.

The table fits a terminal of 80 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from hgms.cli import print_table, terminal_width, wrap_paragraph
from hgms.facts import traits_of
from hgms.plugins import Registry
from hgms.runs.command_line import build_component
from hgms.runs.traits import missing_traits, similar_traits, wanted_traits
from hgms_core import HgmsError, Method

FITS = {True: "ok", False: "no", None: "?"}


def rows_of(
    registry: Registry, methods: Sequence[str] = (), tasks: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a row for each of these methods on each of these tasks.

    If no methods or tasks are named, all are used.
    """
    known = {item.name: item.target for item in registry.components("task")}
    targets = {name: registry.get("task", name).target for name in tasks} or known
    names = [registry.get("method", name).name for name in methods] or [
        item.name for item in registry.components("method")
    ]
    return [row for name in names for row in _cells(registry, name, targets)]


def _cells(registry: Registry, name: str, tasks: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per task for a method.

    ``fits`` states whether the method fits (null: unknown), and ``why`` gives the reason if it does
    not fit.
    """
    for task, target in tasks.items():
        try:
            method = build_component(
                name, Method, traits=traits_of(target) or frozenset(), registry=registry
            )
        except HgmsError:
            method = None
        lacking = missing_traits(method, target) if method is not None else None
        if method is None:
            why = "it cannot be built from its defaults alone"
        elif lacking is None:
            why = "the task declares no traits"
        else:
            why = wanted_traits(lacking) if lacking else ""
            why += "".join(f"; did you mean {trait!r}?" for trait in similar_traits(lacking))
        yield {
            "method": name,
            "task": task,
            "fits": None if lacking is None else not lacking,
            "why": why,
        }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per method, with one column per task.

    For a single task or a single method, print lines with the reasons.
    """
    columns = terminal_width()
    methods, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "task"))
    if len(tasks) == 1 or len(methods) == 1:
        across = "method" if len(tasks) == 1 else "task"
        click.echo(
            f"{'task' if len(tasks) == 1 else 'method'} "
            f"{(tasks if len(tasks) == 1 else methods)[0]}"
        )
        print_table(
            (across, "fits", "why"), [{**row, "fits": FITS[row["fits"]]} for row in rows], columns
        )
        return
    wide = max(map(len, methods)) + sum(max(len(task), 2) + 3 for task in tasks) + 2 > columns
    headings = {task: str(number) if wide else task for number, task in enumerate(tasks, 1)}
    if wide:
        _say(
            "tasks: " + ", ".join(f"{heading}{JOINED}{task}" for task, heading in headings.items()),
            columns,
        )
    table: dict[str, dict[str, str]] = {method: {"method": method} for method in methods}
    for row in rows:
        table[row["method"]][headings[row["task"]]] = FITS[row["fits"]]
    print_table(("method", *headings.values()), list(table.values()), columns)
    reasons: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for method in methods:
        own = [row for row in rows if row["method"] == method and row["why"]]
        for why in dict.fromkeys(row["why"] for row in own):
            where = tuple(row["task"] for row in own if row["why"] == why)
            reasons.setdefault((why, where), []).append(method)
    for (why, where), names in reasons.items():
        _say(f"{', '.join(names)}: {why} ({_spelt(where, tasks)})", columns)


def _spelt(some: Sequence[str], tasks: Sequence[str]) -> str:
    """Return the shorter of two texts for some of the tasks."""
    others = [task for task in tasks if task not in some]
    if not others:
        return "every task"
    return ", ".join(some) if len(some) <= len(others) + 1 else f"all but {', '.join(others)}"


JOINED = "\N{NO-BREAK SPACE}"


def _say(text: str, columns: int) -> None:
    click.echo(wrap_paragraph(text, columns, 2, 6).replace(JOINED, " "))
