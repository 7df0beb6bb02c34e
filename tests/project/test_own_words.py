"""The core and the programs know no plugin by name: of its components, their fields and metrics
none stands there as a string.

A string is a package's own word where the package, the core, or its adapters have an identifier of
that name.
Left out are hgms_mix.stages and the demo, which are about certain components, and docstrings.
"""

from __future__ import annotations

import ast
import functools
import typing
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from hgms.config.invalid import type_hints
from hgms.plugins import Registry
from hgms_core import Composition

ROOT = Path(__file__).parents[2]
CORE = ROOT / "hgms_core"
PLUGINS = ROOT / "plugins"
ADAPTERS = PLUGINS / "hgms" / "adapters"
PROGRAMS = ("cli", "comparison", "config", "diagnosis", "distributed", "executors", "integrations")
PROGRAMS += ("report", "results", "runs", "testing", "uncertainty")
PACKAGES = [
    CORE,
    *(PLUGINS / "hgms" / name for name in PROGRAMS),
    *(PLUGINS / "hgms_mix" / name for name in ("exchange", "surface")),
]

RECORDED = {"hypergradient_norm", "upper_loss", "validation_loss"}
"""Columns of every record, which a task may also measure."""

OF_OPTIONS = {"auto"}
"""Names of components that are also values of many options."""

ALLOWED = {
    "hgms_core": {"floor": "a role of methods", "validation_split": "the place of an error"},
    "hgms.comparison": {
        "uniform": "the reference that theta0 is another name of",
        **dict.fromkeys(("validation-only", "uniform-tilted"), "baselines of every comparison"),
    },
    "hgms_mix.exchange": {
        "mixture": "a stream of random numbers",
        "starts": "where an epoch's rows begin",
    },
    "hgms.results": {
        "uniform": "the default reference",
        **dict.fromkeys(("validation-only", "oracle-joint"), "the ends of the recovered share"),
        "recovery_error": "the metric of tasks with sources that is about θ alone",
    },
    "hgms.config": {
        **dict.fromkeys(
            ("learn_start", "max_curvature", "mixture", "reference", "restart_every", "tilt"),
            "defaults of a configuration file",
        ),
        "identity": "a mark of functions that are told apart",
    },
    "hgms.integrations": {"runs": "a folder of trackers"},
    "hgms_mix.surface": {
        "fixed": "the method of a mixture that is told",
        "top": "matplotlib's word",
        "lr": "the place of an error",
    },
    "hgms.testing": {
        "branches": "the part that the kit takes first",
        "implicit": "the part that the kit takes first",
        "penalty": "a variable of the kit's own problems",
        "carry_rule": "a field with one meaning in all generators",
    },
}


def name_of(package: Path) -> str:
    return ".".join(package.relative_to(PLUGINS if PLUGINS in package.parents else ROOT).parts)


@functools.cache
def words_of_plugins() -> set[str]:
    """Names of components, of their fields, and of tasks' metrics."""
    components = [each for each in Registry.load().components() if each.plugin.name != "core"]
    words = {component.name for component in components}
    for target in (component.target for component in components):
        own = set() if isinstance(target, Composition) else fields_of(target)
        words |= {*getattr(target, "metrics", ()), *own}
    return words - RECORDED - OF_OPTIONS


def fields_of(cls: type) -> set[str]:
    """The fields of a component, and of the settings in them."""
    hints = type_hints(cls)
    parts = [part for hint in hints.values() for part in (hint, *typing.get_args(hint))]
    inner = [part for part in parts if isinstance(part, type) and attrs.has(part)]
    return {*hints}.union(*map(fields_of, inner))


@functools.cache
def nodes(package: Path) -> list[tuple[str, ast.AST]]:
    """Everything in the package's files, and where it stands."""
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


@functools.cache
def identifiers(package: Path) -> set[str]:
    """Every name that the package gives to a variable, an attribute, a parameter, a class or a
    function.
    """
    keys = ("id", "attr", "arg", "name", "asname")
    words = {getattr(node, key, None) for _, node in nodes(package) for key in keys}
    return {word for word in words if isinstance(word, str)}


def foreign_strings(package: Path) -> Iterator[tuple[str, str]]:
    """Each string that is a plugin's word and none of the package's own: where it stands, and
    the word. Docstrings are left out.
    """
    foreign = words_of_plugins() - identifiers(package)
    foreign -= identifiers(CORE) | identifiers(ADAPTERS)
    docs = {id(node.value) for _, node in nodes(package) if isinstance(node, ast.Expr)}
    for place, node in nodes(package):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            word = node.value.removeprefix("metric.")
            if word in foreign:
                yield f"{place}: {node.value!r}", word


@pytest.mark.extended
@pytest.mark.parametrize("package", PACKAGES, ids=name_of)
def test_only_allowed_strings_are_names_of_components(package: Path) -> None:
    allowed = ALLOWED.get(name_of(package), {})
    found = list(foreign_strings(package))
    assert [place for place, word in found if word not in allowed] == []
    assert set(allowed) <= {word for _, word in found}
