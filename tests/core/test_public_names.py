"""The names that are kept for others: documented, complete, and enough for every plugin."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

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


def test_all_names_exist_and_are_listed_once() -> None:
    for module in PUBLIC.values():
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert len(set(module.__all__)) == len(module.__all__)


def test_nothing_public_is_left_out_of_the_list() -> None:
    own = {
        name
        for name, value in vars(hgms_core).items()
        if name[0] != "_" and not inspect.ismodule(value)
    }
    assert own - {"annotations"} == set(hgms_core.__all__)


def documented(module: ModuleType, name: str, strings: Mapping[str, str]) -> str:
    """The docstring of a class or function, or the string below an assignment."""
    thing = getattr(module, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return thing.__doc__ or strings.get(name, "")
    return strings.get(name, "")


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


def test_every_hook_says_what_when_and_how() -> None:
    for hook in HOOKS:
        purpose, *rest = (inspect.getdoc(getattr(hookspecs, hook)) or "").split("\n\n")
        assert len(purpose.split()) >= 4, hook
        if hook not in LIKE_SOLVERS:
            assert any(part.startswith("Called: ") for part in rest), hook
            examples = [part for part in rest if part.startswith(">>> ") and "@hookimpl" in part]
            assert any(f"def {hook}(" in part for part in examples), hook


def test_every_protocol_says_when_and_how() -> None:
    for name, kind in KINDS.items():
        text = inspect.getdoc(kind.protocol) or ""
        assert "Called: " in text, name
        assert ">>> " in text, name


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


PARTS = {"generators", "hypergradients", "methods", "outer", "selectors", "solvers", "tasks"}


def private_names(path: Path) -> list[str]:
    """What a file imports from the core beyond its public names and, in programs, the host."""
    programs = set() if {*path.parts} & PARTS else FOR_PROGRAMS
    return [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for module, name in imports_of(path)
        if module != "hgms_core.torch_errors"
        and not {module, f"{module}.{name}"} & programs
        and (module != "hgms_core" or name not in {*hgms_core.__all__, "__version__"})
    ]


def test_plugins_use_public_names_only() -> None:
    assert [name for path in FILES for name in private_names(path)] == []


def test_pages_use_public_names_only() -> None:
    public = {(name, public) for name, module in PUBLIC.items() for public in module.__all__}
    private = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        taken = re.findall(r"^ *from (hgms_core[\w.]*) import \(?([\w, ]+)", text, re.MULTILINE)
        private += [
            (path.name, module, name)
            for module, names in taken
            if module not in FOR_PROGRAMS
            for name in re.findall(r"\w+", names)
            if (module, name) not in public
        ]
    assert private == []
