"""Methods as named defaults for the parts of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from hgms_core.arguments import reports_errors
from hgms_core.components import read_by_annotation
from hgms_core.pipeline import Pipeline


@reports_errors
@frozen(kw_only=True, field_transformer=read_by_annotation)
class Composition:
    """A method defined by the named parts of a :class:`Pipeline`, as in a TOML file.

    It imports no plugin. Users can override each field, or replace a part by another name.

    Attributes
    ----------
    name, summary
        As they appear in lists.
    source
        The origin of the method.
    parts
        The tables of the parts.
    of
        The class to build: the Pipeline, or a wrapper, with its fields also in ``parts``.
    role
        ``"floor"`` for a trivial baseline, ``"ceiling"`` for a baseline that uses the truth.
    on
        Other defaults for tasks with a trait, by trait.
    testing
        Other settings in the conformance kit, for its problems of size 1.
    testing_failures
        The reason for each check of the kit that the method does not pass.

    Examples
    --------
    >>> tiny = Composition(
    ...     name="hg-tiny",
    ...     summary="One branch, conjugate gradients.",
    ...     source="an example",
    ...     parts={
    ...         "generator": {"name": "branches", "count": 1},
    ...         "selector": {"name": "first"},
    ...         "hypergradient": {"name": "implicit", "solver": {"name": "cg"}},
    ...         "outer": {"name": "adam", "lr": 0.1},
    ...     },
    ... )
    >>> tiny.of.__name__, tiny.parts["outer"]
    ('Pipeline', {'name': 'adam', 'lr': 0.1})
    """

    name: str
    summary: str
    source: str
    parts: Mapping[str, Any] = field(hash=False)
    of: type[Any] = Pipeline
    role: Literal["", "floor", "ceiling"] = ""
    on: Mapping[str, Mapping[str, Any]] = field(factory=dict, hash=False)
    testing: Mapping[str, Any] = field(factory=dict, hash=False)
    testing_failures: Mapping[str, str] = field(factory=dict, hash=False)
