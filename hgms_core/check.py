"""Is this class fit to be a component? What ``hgms check MODULE:CLASS`` asks, one function per question."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import tomlkit
from attrs import frozen

from hgms_core import config, plugins, registry
from hgms_core.errors import ConfigError, HgmsError, PluginError, closest


@frozen
class Result:
    """The answer to one question: ``fault`` is empty where all is well."""

    check: str
    fault: str = ""


def check_registration(cls: type, kind: registry.Kind) -> None:
    """A kebab-case name, an attrs class, every method of the protocol with the protocol's parameters."""
    faults = registry.faults_of(kind, cls)
    assert not faults, "; ".join(faults)


def check_docstring(cls: type, kind: registry.Kind) -> None:
    """A docstring with a first line to show in `hgms list`, and an example."""
    doc = cls.__doc__ or ""
    assert registry.summary_of(doc), "it has no docstring; its first line is what `hgms list` shows"
    assert ">>>" in doc, "its docstring has no example (a line with >>>)"


def check_types(cls: type, kind: registry.Kind) -> None:
    """Every field's type can be evaluated, and is one that a configuration can hold or that has a default."""
    config.type_hints(cls)


def check_construction(cls: type, kind: registry.Kind) -> None:
    """It can be built from its defaults (and parts), or has a class method ``testing_instance`` that says how."""
    instance_of(cls)


def check_frozen(cls: type, kind: registry.Kind) -> None:
    """An instance cannot be changed: its fields are its hyper-parameters, and state is a value."""
    instance = instance_of(cls)
    for name in ("name", *(one.name for one in attrs.fields(cls))):
        try:
            setattr(instance, name, getattr(instance, name))
        except (attrs.exceptions.FrozenError, AttributeError):
            continue
        raise AssertionError(f"its attribute {name!r} can be set; use @attrs.frozen(kw_only=True)")


def check_hashable(cls: type, kind: registry.Kind) -> None:
    """Two instances with equal fields are equal and have one hash."""
    one, other = instance_of(cls), instance_of(cls)
    assert one == other, "two instances with equal fields are not equal"
    try:
        assert hash(one) == hash(other), "two equal instances have different hashes"
    except TypeError as error:
        raise AssertionError(f"it cannot be hashed ({error}); use tuples for fields that are lists") from None


def check_toml(cls: type, kind: registry.Kind) -> None:
    """Written as TOML and read again it is the same."""
    instance = instance_of(cls)
    table = tomllib.loads(tomlkit.dumps(config.plain(instance)))
    converter = config.converter_for(registry.default())
    fields = {key: value for key, value in table.items() if key != "name"}
    try:
        again: Any = converter.structure(fields, cls)
    except config.Invalid as invalid:
        raise AssertionError(invalid.render("its own TOML")) from None
    assert again == instance, f"it comes back as {again!r} instead of {instance!r}"


Check = Callable[[type, registry.Kind], None]

CHECKS: tuple[Check, ...] = (
    check_registration,
    check_docstring,
    check_types,
    check_construction,
    check_frozen,
    check_hashable,
    check_toml,
)


def check(cls: type, kind: registry.Kind | None = None) -> Iterator[Result]:
    """Every check of a class, in order. The rest is left out where there is no instance to ask about."""
    kind = kind if kind is not None else kind_of(cls)
    for question in CHECKS:
        name = question.__name__.removeprefix("check_")
        try:
            question(cls, kind)
        except (AssertionError, HgmsError, TypeError, ValueError) as error:
            text = plugins.describe(error) if not isinstance(error, AssertionError) else str(error)
            yield Result(name, text)
            if question in (check_registration, check_construction):
                return
        else:
            yield Result(name)


def kind_of(cls: type) -> registry.Kind:
    """The kind whose methods the class has, or the one it comes nearest to."""
    kinds = registry.kinds_of(cls)
    if kinds:
        return kinds[0]
    shared = {kind.name: sum(callable(getattr(cls, name, None)) for name in kind.methods()) for kind in registry.KINDS.values()}
    best = max(shared, key=lambda name: shared[name])
    if shared[best] == 0:
        known = "\n  ".join(f"{kind.name}: {', '.join(kind.methods())}" for kind in registry.KINDS.values())
        raise PluginError(f"{cls.__module__}:{cls.__qualname__} has the methods of no kind of component:\n  {known}")
    return registry.KINDS[best]


def instance_of(cls: Any) -> Any:
    """An instance to look at: its own ``testing_instance()``, or its defaults, with any registered parts it needs."""
    if hasattr(cls, "testing_instance"):
        return cls.testing_instance()
    hints = config.type_hints(cls)
    required = [one for one in attrs.fields(cls) if one.init and one.default is attrs.NOTHING]
    parts = {one.alias: _part(config.PROTOCOLS[hints[one.name]]) for one in required if hints[one.name] in config.PROTOCOLS}
    try:
        return cls(**parts)
    except TypeError as error:
        raise AssertionError(
            f"it cannot be built without arguments ({error}); give its fields defaults, or a class method testing_instance()"
        ) from None


def _part(kind: registry.Kind) -> Any:
    """Any registered component of a kind."""
    for component in registry.default().components(kind.name):
        if isinstance(component.target, type):
            with contextlib.suppress(AssertionError):
                return instance_of(component.target)
    raise AssertionError(f"it needs a {kind.label}, and none is installed to try it with")


def import_class(spec: str) -> type:
    """``package.module:Class`` or ``file.py:Class``."""
    where, colon, name = spec.rpartition(":")
    if not colon or not re.fullmatch(r"\w+", name):
        raise ConfigError(f"{spec!r} is not of the form MODULE:CLASS, such as my_solver:MySolver or ./my_solver.py:MySolver")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = plugins.import_plugin(where) if where.endswith(".py") else importlib.import_module(where)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"{where} cannot be imported: {plugins.describe(error)}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        names = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = closest(name, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise PluginError(f"{where} has no class {name!r}{hint}")
    return found
