"""Conversion of command-line arguments to configurations and components."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hgms.arguments import errors_at
from hgms.config.convert import structure
from hgms.config.invalid import PROTOCOLS
from hgms.config.tables import merge_options, merge_setting, tables_of
from hgms.plugins import Registry
from hgms.runs.config import RunConfig


def load(
    path: str | Path,
    sets: Sequence[str] = (),
    *,
    seed: int | None = None,
    out: str | None = None,
    registry: Registry | None = None,
) -> RunConfig:
    """Load the configuration in a TOML file.

    ``--set key.of.it=value``, ``--seed`` and ``--out`` override its values.
    """
    table = tables_of(Path(path), "configuration")
    places = merge_options(table, sets, seed, out=out)
    return RunConfig.from_dict(table, source=Path(path).name, registry=registry, sets=places)


def build_component(
    name: str,
    protocol: Any,
    fields: Sequence[str] = (),
    traits: frozenset[str] = frozenset(),
    registry: Registry | None = None,
) -> Any:
    """Build the task or method with this name.

    ``task.FIELD=VALUE`` or ``method.FIELD=VALUE`` override its defaults. The defaults of a method
    are those for a task with ``traits``.
    """
    kind = PROTOCOLS[protocol].name
    table: dict[str, Any] = {kind: {"name": name}}
    for assignment in fields:
        merge_setting(table, assignment)
    with errors_at(kind):
        return structure(table[kind], protocol, registry or Registry.load(), traits)
