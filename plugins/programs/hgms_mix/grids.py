"""A mix out of a grid: one file serves `hgms compare`, for the mixtures of all its methods, and `hgms mix`, for one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hgms_compare import scaled
from hgms_core import ConfigError, overlay, unknown

OF_GRIDS = ("seeds", "metric", "reference", "sweep", "scale")


def mix_of(table: Mapping[str, Any], method: str | None, scale: str | None, source: str) -> dict[str, Any]:
    """The table of one mix: the grid's single task, and the method labelled ``method``. A table that is a mix's already stays
    as it is.

    >>> grid = {"seeds": [7], "task": {"name": "t", "label": "a"}, "method": ["x", {"name": "y", "label": "z", "lr": 1}]}
    >>> mix_of(grid, "z", None, "grid.toml")
    {'task': {'name': 't'}, 'method': {'name': 'y', 'lr': 1}, 'seed': 7, 'run': {'task_label': 'a', 'label': 'z'}}
    """
    if not isinstance(table.get("method"), list):
        if method is not None or scale is not None:
            raise ConfigError(f"--method and --scale choose from a grid; {source} has one method\n  --set method.name=NAME")
        return _named(table, table.get("task"), table.get("method"))
    table = scaled(table, scale, source)
    task_label, task = _chosen(table.get("task"), None, "task", source)
    _, chosen = _chosen(table["method"], method, "method", source)
    special = chosen.pop("on", {}).get(task_label, {})
    seeds = table.get("seeds", 1)
    seed = seeds[0] if isinstance(seeds, Sequence) and seeds else 0
    kept = {key: value for key, value in table.items() if key not in OF_GRIDS}
    return _named({**kept, "seed": seed}, task, overlay(chosen, special))


def _named(table: Mapping[str, Any], task: Any, method: Any) -> dict[str, Any]:
    """The table with this task and method, whose labels are settings of the run."""
    run = table.get("run", {})
    labels = {}
    for key, part in (("task_label", task), ("label", method)):
        if isinstance(part, dict) and "label" in part:
            labels[key] = part.pop("label")
    parts = {key: part for key, part in (("task", task), ("method", method)) if part is not None}
    return {**table, **parts, **({"run": {**run, **labels}} if labels and isinstance(run, Mapping) else {})}


def _chosen(part: Any, label: str | None, kind: str, source: str) -> tuple[str, dict[str, Any]]:
    """The label and the table of the entry called ``label``, or of the only one there is."""
    listed = [{"name": entry} if isinstance(entry, str) else entry for entry in (part if isinstance(part, list) else [part])]
    tables = [dict(entry) for entry in listed if isinstance(entry, Mapping)]
    by_label = {str(entry.get("label", entry.get("name"))): entry for entry in tables}
    if label is None and len(by_label) == 1:
        return next(iter(by_label.items()))
    if label is None:
        how = "add --method LABEL" if kind == "method" else "a mix has one task"
        raise ConfigError(f"{source} is a grid of {len(by_label)} {kind}s ({', '.join(by_label)})\n  {how}")
    if label not in by_label:
        raise ConfigError(f"{unknown(kind, label, by_label)}\n  @ {source}.{kind}")
    return label, by_label[label]
