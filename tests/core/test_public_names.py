"""The names that are kept for others: documented, complete, and enough for every plugin."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import hgms.adapters
import hgms.comparison
import hgms.config
import hgms.integrations
import hgms.report
import hgms.results
import hgms.runs
import hgms.testing
import hgms_core
from hgms.plugins import KINDS, hookspecs
from hgms_core import arguments, capabilities, errors, protocols, torch_errors, validators

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    module.__name__: module
    for module in (
        hgms_core,
        arguments,
        capabilities,
        errors,
        validators,
        hgms.adapters,
        hgms.comparison,
        hgms.integrations,
        hgms.report,
        hgms.results,
        hgms.runs,
        hgms.testing,
    )
}
"""What is kept for others, as the plugin API is."""
"""The hooks that are called as that for linear solvers, whose docstring says when and how for
all of them.
"""


def test_all_names_exist_and_are_listed_once_and_none_is_left_out() -> None:
    for module in PUBLIC.values():
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert len(set(module.__all__)) == len(module.__all__)
    own = {
        name
        for name, value in vars(hgms_core).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    assert own - {"annotations"} == set(hgms_core.__all__)


def documented(module: ModuleType, name: str, strings: Mapping[str, str]) -> str:
    """The docstring of a class or function, or the string below an assignment."""
    thing = inspect.unwrap(getattr(module, name))  # a cache has no docstring of its own
    own = thing.__doc__ if inspect.isclass(thing) or inspect.isfunction(thing) else ""
    return own or strings.get(name, "")


def notes() -> dict[str, str]:
    """The strings below the assignments of the public packages' modules."""
    folders = [Path(str(module.__file__)).parent for module in (*PUBLIC.values(), hgms.config)]
    return {
        target.id: str(after.value.value)
        for folder in folders
        for path in folder.rglob("*.py")
        for statement, after in itertools.pairwise(ast.parse(path.read_text("utf-8")).body)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for target in getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(target, ast.Name)
    }


def test_every_public_name_is_documented() -> None:
    strings = notes()
    assert [
        f"{module.__name__}.{name}"
        for module in PUBLIC.values()
        for name in module.__all__
        if len(documented(module, name, strings).split()) < 3
    ] == []


def test_every_public_name_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    on_it = set(re.findall(r"^\| \[?`(\w+)`(?:\]\([^)]+\))? \|", page, re.MULTILINE))
    assert on_it == {
        name for module in PUBLIC.values() if module is not hgms.testing for name in module.__all__
    }


def test_the_protocols_are_all_kinds_and_say_when_and_how() -> None:
    named = {name for name, it in vars(protocols).items() if getattr(it, "_is_protocol", False)}
    assert named - {"Protocol"} == {kind.protocol.__name__ for kind in KINDS.values()}
    for kind in KINDS.values():
        text = inspect.getdoc(kind.protocol) or ""
        assert ("Called: " in text, ">>> " in text) == (True, True), kind.name
        assert hasattr(hookspecs, kind.hook)


IMPORT = re.compile(
    r"^ *(?:from (hgms_core[\w.]*) import (\([^)]*\)|.*)|import (hgms_core[\w.]*))", re.MULTILINE
)


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything a file takes from the core, also for types only."""
    for found in IMPORT.finditer(path.read_text(encoding="utf-8")):
        names = re.sub("#.*", "", found[2] or "").strip("() \n").split(",")
        yield from ((found[1] or found[3], name.split()[0]) for name in names if name.strip())
        yield from [(found[3], "")] if found[3] else []


FILES = sorted(
    [
        *(ROOT / "plugins").rglob("*.py"),
        *(ROOT / "docs" / "examples").glob("*/src/**/*.py"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PROGRAMS = ("annotations", "arguments", "components", "errors")
FOR_PROGRAMS = {f"hgms_core.{name}" for name in PROGRAMS}
"""What programs may use in addition to the public names."""
PARTS = {"generators", "hypergradients", "methods", "outer", "selectors", "solvers", "tasks"}


SHARED: dict[str, Collection[str]] = {
    "hgms_core": {*hgms_core.__all__, "__version__", ""},
    **{module.__name__: module.__all__ for module in (arguments, capabilities, errors, validators)},
    "hgms_core.hypergrad": (
        "check_dense",
        "difference_step",
        "lacks_gradient",
        "twice_differentiable_attention",
    ),
    "hgms_core.trees": ("check_alike", "require_grad", "summary"),
    "hgms_core.torch_errors": vars(torch_errors),
}
"""What all plugins may use, by module."""


def private_names(path: Path) -> list[str]:
    """What a file imports from the core beyond its public names and, in programs, the host."""
    programs = set() if {*path.parts} & PARTS else FOR_PROGRAMS
    return [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for module, name in imports_of(path)
        if not {module, f"{module}.{name}"} & programs and name not in SHARED.get(module, ())
    ]


def test_plugins_and_pages_use_public_names_only() -> None:
    assert sum(len(list(imports_of(path))) for path in FILES) > 1000
    assert [name for path in FILES for name in private_names(path)] == []
