"""``hgms compat``: compatibility of methods and tasks, as rows and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hgms.cli import print_table, terminal_width
from hgms.config.tables import group_values
from hgms.facts import traits_of
from hgms.plugins import Registry
from hgms.runs.command_line import build_component
from hgms.runs.traits import missing_traits, wanted_traits
from hgms_core import HgmsError, Method


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
        yield {
            "method": name,
            "task": task,
            "fits": None if lacking is None else not lacking,
            "why": why,
        }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per method: the tasks that it fits, and the reasons for the others."""
    table = []
    for method, of_tasks in group_values((row["method"], row) for row in rows).items():
        fits = [row["task"] for row in of_tasks if row["fits"]]
        reasons = dict.fromkeys(row["why"] for row in of_tasks if row["why"])
        shown = "all tasks" if len(fits) == len(of_tasks) else ", ".join(fits) or "–"
        table.append({"method": method, "fits": shown, "why not others": "; ".join(reasons)})
    print_table(("method", "fits", "why not others"), table, terminal_width())
