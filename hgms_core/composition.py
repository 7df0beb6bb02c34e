"""Methods that are a :class:`hgms_core.Pipeline` with parts of their own, named as in a TOML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen

from hgms_core.pipeline import Pipeline


@frozen(kw_only=True)
class Composition:
    """A method that is a :class:`Pipeline` with parts of its own, given by name as they would be in a TOML file.

    So a composition needs no import of the plugins its parts come from. Whoever uses it may override any part's fields, or a
    whole part by another name. ``source`` says where the method comes from; ``of`` is another method class than the Pipeline.
    ``on`` holds other defaults for tasks with a trait (:mod:`hgms_core.traits`), laid over the parts: what fits a hundred small
    networks a second does not fit one language model. ``testing`` is laid over them where the conformance kit asks, on problems
    of size 1; ``testing_failures`` holds the reason for each check that its definition does not pass, as a class's does.

    >>> Composition(name="hg-tiny", summary="One branch, conjugate gradients.", source="an example", parts={
    ...     "generator": {"name": "branches", "count": 1}, "selector": {"name": "first"},
    ...     "hypergradient": {"name": "implicit", "solver": {"name": "cg"}}, "outer": {"name": "adam", "lr": 0.1},
    ... }).with_overrides({"outer": {"lr": 0.2}, "hypergradient": {"solver": {"name": "minres"}}})["outer"]
    {'name': 'adam', 'lr': 0.2}
    """

    name: str
    summary: str
    source: str
    parts: Mapping[str, Any] = field(hash=False)
    of: type[Any] = Pipeline
    on: Mapping[str, Mapping[str, Any]] = field(factory=dict, hash=False)
    testing: Mapping[str, Any] = field(factory=dict, hash=False)
    testing_failures: Mapping[str, str] = field(factory=dict, hash=False)

    def with_overrides(self, table: Mapping[str, Any], traits: Iterable[str] = ()) -> dict[str, Any]:
        """The parts on a task with these traits, with ``table`` laid over them."""
        parts: Mapping[str, Any] = self.parts
        for trait in sorted(set(traits) & set(self.on)):
            parts = overlay(parts, self.on[trait])
        return overlay(parts, table)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``: tables are merged key by key; a table that names another component replaces the whole.

    >>> overlay({"solver": {"name": "cg", "rtol": 1e-3}}, {"solver": {"max_steps": 5}})
    {'solver': {'name': 'cg', 'rtol': 0.001, 'max_steps': 5}}
    >>> overlay({"solver": {"name": "cg", "rtol": 1e-3}}, {"solver": "minres"})
    {'solver': {'name': 'minres'}}
    """
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in over.items():
        below = merged.get(key)
        named = isinstance(below, Mapping) and "name" in below
        table = {"name": value} if named and isinstance(value, str) and value != "none" else value
        if (
            isinstance(below, Mapping)
            and isinstance(table, Mapping)
            and table.get("name", below.get("name")) == below.get("name")
        ):
            merged[key] = overlay(below, table)
        else:
            merged[key] = dict(table) if isinstance(table, Mapping) else table
    return merged
