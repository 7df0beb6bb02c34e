"""Methods as named defaults for the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from attrs import field, frozen

from hgms_core.pipeline import Pipeline
from hgms_core.validators import choice


@frozen(kw_only=True)
class Composition:
    """A method defined by the named parts of a :class:`Pipeline`, as in a TOML file.

    It imports no plugin. Users can override each field, or replace a part by another name.

    Attributes:
        name, summary: as they appear in lists.
        source: the origin of the method.
        parts: the tables of the parts.
        of: the class to build: the Pipeline, or a wrapper, with its fields also in ``parts``.
        role: ``"floor"`` for a trivial baseline, ``"ceiling"`` for a baseline that uses the truth.
        on: other defaults for tasks with a trait, by trait.
        testing: other settings in the conformance kit, for its problems of size 1.
        testing_failures: the reason for each check of the kit that the method does not pass.

    >>> Composition(
    ...     name="hg-tiny",
    ...     summary="One branch, conjugate gradients.",
    ...     source="an example",
    ...     parts={
    ...         "generator": {"name": "branches", "count": 1},
    ...         "selector": {"name": "first"},
    ...         "hypergradient": {"name": "implicit", "solver": {"name": "cg"}},
    ...         "outer": {"name": "adam", "lr": 0.1},
    ...     },
    ... ).with_overrides({"outer": {"lr": 0.2}, "hypergradient": {"solver": {"name": "minres"}}})[
    ...     "outer"
    ... ]
    {'name': 'adam', 'lr': 0.2}
    """

    name: str
    summary: str
    source: str
    parts: Mapping[str, Any] = field(hash=False)
    of: type[Any] = Pipeline
    role: Literal["", "floor", "ceiling"] = field(
        default="", validator=choice("", "floor", "ceiling")
    )
    on: Mapping[str, Mapping[str, Any]] = field(factory=dict, hash=False)
    testing: Mapping[str, Any] = field(factory=dict, hash=False)
    testing_failures: Mapping[str, str] = field(factory=dict, hash=False)

    def with_overrides(
        self, table: Mapping[str, Any], traits: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Return the parts for a task with these traits, overridden by ``table``."""
        parts: Mapping[str, Any] = self.parts
        for trait in sorted(set(traits) & set(self.on)):
            parts = overlay(parts, self.on[trait])
        return overlay(parts, table)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables key by key.

    A table that names another component replaces the whole part.

    >>> overlay({"solver": {"name": "cg", "rtol": 1e-3}}, {"solver": {"max_steps": 5}})
    {'solver': {'name': 'cg', 'rtol': 0.001, 'max_steps': 5}}
    """
    merged = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()
    }
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping):
            if "name" in below and isinstance(value, str) and value != "none":
                value = {"name": value}
            if isinstance(value, Mapping) and value.get("name", below.get("name")) == below.get(
                "name"
            ):
                value = overlay(below, value)
        merged[key] = dict(value) if isinstance(value, Mapping) else value
    return merged
