"""Run the checks of :mod:`hgms.testing` on a class, for ``hgms check MODULE:CLASS``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from hgms.plugins import (
    KINDS,
    NAME,
    Host,
    Kind,
    Registry,
    describe,
    faults_of,
    import_plugin,
    inside,
    watch_plugin,
)
from hgms.runs import undeclared_plugins
from hgms.testing.class_checks import class_checks
from hgms.testing.instances import declared_failures, failures_of, instance_of
from hgms.testing.instances import kind_of as kind_of
from hgms.testing.kit import Check
from hgms.testing.suite import Result, checks_of, checks_of_kind, verdict
from hgms_core import Composition, ConfigError
from hgms_core.errors import PluginError, closest

METHOD = KINDS["method"]
FORM = "write a module and a class, such as my_solver:MySolver or ./my_solver.py:MySolver"


def check(
    cls: type | Composition, kind: Kind | None = None, registry: Registry | None = None
) -> Iterator[Result]:
    """Run every check of a class, in order.

    The checks use an instance from ``testing_instance()`` or from the default values. Its parts
    come from the ``registry``. If no instance can be built, the remaining checks are skipped. A
    composition is not a class: only the checks of methods run on it.
    """
    registry = registry or Registry.load()
    if isinstance(cls, Composition):
        summary = "its summary is empty; `hgms list` shows it"
        source = "its source is empty; say where the method comes from"
        yield from (
            Result("registration", "; ".join(faults_of(METHOD, cls, registry.wrappers))),
            Result("docstring", "" if cls.summary.strip() else summary),
            Result("source", "" if cls.source.strip() else source),
        )
        yield from _of_an_instance(cls, lambda instance: checks_of_kind("method"), registry)
        return
    kind = kind if kind is not None else kind_of(cls)
    answered = []
    declared = declared_failures(cls)
    for question in class_checks(kind):
        answered.append(question.name)
        result = verdict(question, cls, declared if isinstance(declared, Mapping) else {})
        yield result
        if result.fault and question.name == "registration":
            return
    yield from _of_an_instance(
        cls, lambda instance: list(checks_of(instance, kind, registry)), registry, answered
    )


def _of_an_instance(
    target: type | Composition,
    questions_for: Callable[[object], list[Check]],
    registry: Registry,
    answered: Sequence[str] = (),
) -> Iterator[Result]:
    """Run the checks of an instance, except those in ``answered``."""
    try:
        instance = instance_of(target, registry)
        questions = questions_for(instance)
        expected = failures_of(target, questions)
    except (Exception, SystemExit) as error:
        yield Result(
            "construction", str(error) if isinstance(error, AssertionError) else describe(error)
        )
        return
    yield Result("construction")
    for question in questions:
        if question.name not in answered:
            yield verdict(question, instance, expected)


def target_of(spec: str, registry: Registry) -> tuple[Kind, type | Composition, Registry]:
    """Resolve the component to check: its kind, the component, and the registry for its parts.

    ``spec`` is ``MODULE:CLASS`` or ``FILE.py:CLASS`` (also for a composition), or a registered name
    such as ``cg``. If two kinds register the same name, use ``method:soba``. The returned registry
    includes the parts that the module registers.
    """
    word, _, name = spec.rpartition(":")
    if word and not (word in KINDS and NAME.fullmatch(name)):
        module, target = import_class(spec)
        kind = METHOD if isinstance(target, Composition) else kind_of(target)
        of_parts = isinstance(target, Composition) or inside(target) is not None
        return kind, target, with_own_parts(module, registry) if of_parts else registry
    if word:
        return KINDS[word], registry.get(word, name).target, registry
    if spec.endswith(".py") or not NAME.fullmatch(name):
        raise wrong_form(spec)
    kinds = [kind for kind in KINDS.values() if registry.find(kind.name, name) is not None]
    if len(kinds) != 1:
        names = sorted({component.name for component in registry.components()})
        forms = [f"use {kind.name}:{name}" for kind in kinds]
        raise ConfigError(
            "ambiguous-name" if kinds else "unknown-component",
            f"{len(kinds)} components have the name {name!r}"
            if kinds
            else f"unknown component {name!r}",
            place=("MODULE:CLASS",),
            hint="\n".join([*forms, FORM, "run `hgms list` for all names"]),
            did_you_mean=() if kinds else nearest(name, names),
        )
    return kinds[0], registry.get(kinds[0].name, name).target, registry


def with_own_parts(module: ModuleType, registry: Registry) -> Registry:
    """Extend the registry by the hooks of the module, unless the module is one of its plugins.

    Errors in these hooks are warnings: a missing part is reported by the check that needs it.
    """
    file = Path(module.__file__).resolve() if module.__file__ else None
    plugins = {info.module for info in registry.host.infos.values()}
    files = {
        Path(os.path.expanduser(where)).resolve() for where in plugins if where.endswith(".py")
    }
    if (
        module.__name__ in plugins
        or file in files
        or not any(hasattr(part, "hgms_impl") for part in vars(module).values())
    ):
        return registry
    return Registry(Host.load([*undeclared_plugins(registry.host), module], tolerant=True))


def import_class(spec: str) -> tuple[ModuleType, type | Composition]:
    """Import ``package.module:Class`` or ``file.py:Class``; return the module and the class.

    A composition is found by the name of its variable or by its registered name.
    """
    where, colon, name = spec.rpartition(":")
    if not where or not colon or not (re.fullmatch(r"\w+", name) or NAME.fullmatch(name)):
        raise wrong_form(spec)
    if os.getcwd() not in sys.path:
        # Last, so that a local random.py does not replace the standard library's.
        sys.path.append(os.getcwd())
    try:
        with watch_plugin():
            module = (
                import_plugin(where) if where.endswith(".py") else importlib.import_module(where)
            )
    except (PluginError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(
            "wrong-plugin", f"the module cannot be imported: {describe(error)}", place=(where,)
        ) from error
    getattr(module, name, None)  # loads a name of a lazy module
    own = {
        key: value for key, value in vars(module).items() if isinstance(value, type | Composition)
    }
    named = {value.name: value for value in own.values() if isinstance(value, Composition)}
    if (target := own.get(name) or named.get(name)) is None:
        raise PluginError(
            "unknown-class",
            f"there is no class {name!r}",
            place=(where,),
            did_you_mean=nearest(name, [*own, *named]),
        )
    return module, target


def wrong_form(spec: str) -> ConfigError:
    return ConfigError(
        "wrong-value", f"{spec!r} names no class", place=("MODULE:CLASS",), hint=FORM
    )


def nearest(name: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the nearest name as a tuple, empty if no name is near."""
    near = closest(name, names)
    return () if near is None else (near,)
