"""Scales of a grid: one file for the machine of a paper and for the machine at hand.

::

    budget = "60s"
    [run]
    device = "cuda"

    [scale.cpu]                                 # hgms compare grid.toml --scale cpu
    budget = "30s"
    run.device = "cpu"
    task."*".train_size = 1000                  # all tasks
    method.hg-ms.generator.count = 2            # one method, by its label

A scale is merged into the file before its values are read, so its values are checked like all
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms.arguments import require, require_known
from hgms.comparison.grid import NO_FILE, copy_table, root_of
from hgms.config.tables import overlay_tables
from hgms_core.errors import Place

ALL = "*"


def apply_scale(
    table: Mapping[str, Any], name: str | None, source: str = NO_FILE
) -> dict[str, Any]:
    """Return the table without its scales, merged with the scale called ``name``.

    Examples
    --------
    >>> apply_scale(
    ...     {
    ...         "budget": "60s",
    ...         "method": ["a"],
    ...         "scale": {"cpu": {"budget": "9s", "method": {"a": {"lr": 1}}}},
    ...     },
    ...     "cpu",
    ... )
    {'budget': '9s', 'method': [{'name': 'a', 'lr': 1}]}
    """
    place = (*root_of(source), "scale")
    base: dict[str, Any] = copy_table(table)
    scales = base.pop("scale", {})
    require(
        isinstance(scales, Mapping)
        and all(isinstance(changes, Mapping) for changes in scales.values()),
        "wrong-type",
        "scale must contain one table per scale",
        place=place,
    )
    if name is None:
        return base
    require_known("scale", name, scales, place)
    over = dict(scales[name])
    for kind in ("task", "method"):
        if kind in over:
            base[kind] = _entries(base.get(kind, []), over.pop(kind), kind, (*place, name, kind))
    return overlay_tables(base, over)


def _entries(entries: Any, changes: Any, kind: str, place: Place) -> list[Any]:
    """Apply changes to the [[task]] or [[method]] tables: first changes for all, then by label."""
    require(
        isinstance(changes, Mapping)
        and all(isinstance(change, Mapping) for change in changes.values()),
        "wrong-type",
        f"{kind} of a scale must contain one table of settings per {kind}",
        place=place,
    )
    listed = entries if isinstance(entries, list) else [entries]
    tables = [{"name": entry} if isinstance(entry, str) else entry for entry in listed]
    if not all(isinstance(table, Mapping) for table in tables):
        return listed  # the grid reports this error
    by_label = [(str(table.get("label", table.get("name"))), table) for table in tables]
    labels = [label for label, _ in by_label]
    for label, change in changes.items():
        if label != ALL:
            require_known(kind, label, labels, (*place, label))
        require(
            "name" not in change,
            "not-supported",
            f"the name of a {kind} cannot differ between scales",
            hint=f"add a [[{kind}]] table with this name",
            place=(*place, label, "name"),
        )
    return [
        overlay_tables(overlay_tables(table, changes.get(ALL, {})), changes.get(label, {}))
        for label, table in by_label
    ]
