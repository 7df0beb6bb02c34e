"""The names that are kept for others: documented, complete, and enough for every plugin."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hgms.comparison
import hgms.config
import hgms.integrations
import hgms.report
import hgms.results
import hgms.runs
import hgms.testing
import hgms_core
from hgms_core import hookspecs, protocols
from hgms_core.registry import KINDS

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    module.__name__: module
    for module in (
        hgms_core,
        hgms.comparison,
        hgms.integrations,
        hgms.report,
        hgms.results,
        hgms.runs,
        hgms.testing,
    )
}
"""What is kept for others, as the plugin API is."""
HOOKS = [name for name in vars(hookspecs) if name.startswith("hgms_")]
LIKE_SOLVERS = {kind.hook for kind in KINDS.values() if kind.name != "solver"} | {
    "hgms_register_executors"
}
"""The hooks that are called as that for linear solvers, whose docstring says when and how for
all of them.
"""


@pytest.mark.parametrize("module", PUBLIC.values(), ids=PUBLIC)
def test_all_lists_what_is_there(module: ModuleType) -> None:
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def test_nothing_public_is_left_out_of_the_list() -> None:
    own = {
        name
        for name, value in vars(hgms_core).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    assert own - {"annotations"} == set(hgms_core.__all__)


def documented(module: ModuleType, name: str) -> str:
    """The docstring of a class or function, or the string below an assignment."""
    thing = getattr(module, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return thing.__doc__ or NOTES.get(name, "")
    return NOTES.get(name, "")


def notes() -> dict[str, str]:
    """The strings below the assignments of the public packages' modules."""
    strings = {}
    modules = [*PUBLIC.values(), hgms.config]
    for path in [
        file for module in modules for file in Path(str(module.__file__)).parent.rglob("*.py")
    ]:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                text = after.value.value if isinstance(after.value, ast.Constant) else ""
                strings |= {
                    target.id: str(text) for target in targets if isinstance(target, ast.Name)
                }
    return strings


NOTES = notes()


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in PUBLIC for name in PUBLIC[module].__all__]
)
def test_every_public_name_is_documented(module: str, name: str) -> None:
    assert len(documented(PUBLIC[module], name).split()) >= 3


def test_every_public_name_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    on_it = set(re.findall(r"^\| \[?`(\w+)`(?:\]\([^)]+\))? \|", page, re.MULTILINE))
    assert on_it == {
        name for module in PUBLIC.values() if module is not hgms.testing for name in module.__all__
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_what_when_and_how(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    purpose, *rest = text.split("\n\n")
    assert len(purpose.split()) >= 4
    if hook not in LIKE_SOLVERS:
        assert any(part.startswith("Called: ") for part in rest)
        assert any(
            part.startswith(">>> ") and "@hookimpl" in part and f"def {hook}(" in part
            for part in rest
        )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_protocol_says_what_when_and_how(kind: object) -> None:
    text = inspect.getdoc(kind.protocol) or ""  # type: ignore[attr-defined]
    assert "Called: " in text
    assert ">>> " in text


def test_the_protocols_are_all_kinds() -> None:
    named = {
        name for name, value in vars(protocols).items() if getattr(value, "_is_protocol", False)
    } - {"Protocol"}
    assert named == {kind.protocol.__name__ for kind in KINDS.values()}


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything a file takes from the core, also for types only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] == "hgms_core"
        ):
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (
                (alias.name, "")
                for alias in node.names
                if alias.name.partition(".")[0] == "hgms_core"
            )


FILES = sorted(
    [*(ROOT / "plugins").rglob("*.py"), *(ROOT / "docs" / "examples").glob("*/src/**/*.py")]
)
FOR_PROGRAMS = {
    "hgms_core.errors",
    "hgms_core.host",
    "hgms_core.registry",
    "hgms_core.torch_errors",
}
"""Modules that programs may use in addition to the public names."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_use_nothing_else(path: Path) -> None:
    taken = {
        (module, name) for module, name in imports_of(path) if module != "hgms_core.torch_errors"
    }
    if not {*path.parts} & {
        "generators",
        "hypergradients",
        "methods",
        "outer",
        "selectors",
        "solvers",
        "tasks",
    }:
        taken = {
            (module, name)
            for module, name in taken
            if not {module, f"{module}.{name}"} & FOR_PROGRAMS
        }
    private = {
        (module, name)
        for module, name in taken
        if module != "hgms_core" or name not in hgms_core.__all__
    }
    assert not private - {("hgms_core", "__version__")}, (
        f"take these from hgms_core: {sorted(private)}"
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_pages_use_nothing_else(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    taken = re.findall(r"^ *from (hgms_core[\w.]*) import \(?([\w, ]+)", text, re.MULTILINE)
    private = {(module, name) for module, names in taken for name in re.findall(r"\w+", names)} - {
        (name, public) for name, module in PUBLIC.items() for public in module.__all__
    }
    private = {(module, name) for module, name in private if module not in FOR_PROGRAMS}
    assert not private, f"these are not public: {sorted(private)}"
