"""The declarations of a class for its checks: a test instance and the expected failures."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import attrs

from hgms.arguments import require, require_known
from hgms.config.convert import structure
from hgms.config.invalid import PROTOCOLS, kinds_of, match_score, type_hints
from hgms.config.tables import overridden
from hgms.plugins import KINDS, Kind, Registry, faults_of, inside
from hgms.testing.kit import Check
from hgms_core import Composition, ConfigError, HgmsError
from hgms_core.capabilities import HasTestingInstance, find
from hgms_core.errors import PluginError, closest
from hgms_core.torch_errors import first_line


def kind_of(cls: type) -> Kind:
    """Return the kind with the methods of the class, or the nearest kind."""
    kinds = kinds_of(cls)
    if kinds and not faults_of(kinds[0], cls):
        return kinds[0]
    likely = [*kinds, *(kind for kind in KINDS.values() if kind not in kinds)]
    best = max(likely, key=lambda kind: match_score(kind, cls))
    if not match_score(best, cls):
        shown = [name for name, value in vars(cls).items() if callable(value) and name[0] != "_"]
        every = [name for kind in KINDS.values() for name in kind.methods()]
        near = [(name, closest(name, every)) for name in shown]
        renamed = [f"rename the method {name} to {other}" for name, other in near if other]
        known = [f"{kind.name}: {', '.join(kind.methods())}" for kind in KINDS.values()]
        raise PluginError(
            "wrong-plugin",
            "the class has the methods of no kind of component",
            place=(f"{cls.__module__}:{cls.__qualname__}",),
            hint="\n".join([*renamed, "add the methods of one kind:", *known]),
        )
    return best


def instance_of(cls: Any, registry: Registry | None = None) -> Any:
    """Build the instance that the checks use.

    The default is ``testing_instance()``, else the class with its default values and any registered
    parts that it requires. For a composition: its parts, overridden by its ``testing`` values. For
    a wrapper: a registered composition that uses it.
    """
    if isinstance(cls, Composition):
        try:
            parts = overridden(cls, cls.testing)
            return structure(parts, cls.of, registry or Registry.load())
        except HgmsError as error:
            raise AssertionError(str(error.at(f"the composition {cls.name!r}"))) from None
    if known := find(cls, HasTestingInstance):
        return known.testing_instance()
    if inside(cls) is not None:
        registry = registry or Registry.load()
        for component in registry.components("method"):
            if isinstance(component.target, Composition) and component.target.of is cls:
                return instance_of(component.target, registry)
    hints = type_hints(cls)
    required = [
        field for field in attrs.fields(cls) if field.init and field.default is attrs.NOTHING
    ]
    kinds = {
        field.alias: PROTOCOLS[hints[field.name]]
        for field in required
        if hints[field.name] in PROTOCOLS
    }
    parts = {name: _part(kind, registry or Registry.load()) for name, kind in kinds.items()}
    try:
        return cls(**parts)
    except (TypeError, ConfigError) as error:
        reason = error.message if isinstance(error, HgmsError) else first_line(error)
        raise AssertionError(
            f"it cannot be built without arguments ({reason}); give its fields defaults, or a "
            "class method testing_instance()"
        ) from None


def declared_failures(cls: object) -> object:
    """Return ``testing_failures`` of a class, unchecked."""
    return getattr(cls, "testing_failures", {})


def failures_of(cls: type | Composition, checks: list[Check]) -> Mapping[str, str]:
    """Return ``testing_failures``: the reason for each check that instances need not pass.

    Raises
    ------
    ConfigError
        For a check that does not exist, or for an empty reason.
    """
    declared: Any = declared_failures(cls)
    owner = (
        f"the composition {cls.name!r}"
        if isinstance(cls, Composition)
        else f"{cls.__module__}:{cls.__qualname__}"
    )
    where = (owner, "testing_failures")
    require(
        isinstance(declared, Mapping),
        "wrong-type",
        f"testing_failures={declared!r} must be a table of check names and reasons",
        place=where,
    )
    for name, reason in declared.items():
        require_known("check", name, [check.name for check in checks], (*where, name))
        require(
            isinstance(reason, str) and reason.strip(),
            "wrong-value",
            f"{reason!r} must be the reason why the check {name!r} fails",
            place=(*where, name),
        )
    return declared


FIRST = {"generator": "branches", "hypergradient": "implicit", "method": "pipeline"}
"""The preferred parts, which fit most others; if one is not installed, any other is used."""


def _part(kind: Kind, registry: Registry) -> Any:
    """Build a registered component of the kind."""
    for component in sorted(
        registry.components(kind.name), key=lambda candidate: candidate.name != FIRST.get(kind.name)
    ):
        if isinstance(component.target, type):
            with contextlib.suppress(AssertionError):
                return instance_of(component.target, registry)
    raise AssertionError(f"it needs {kind.with_article}, and none is installed to try it with")
