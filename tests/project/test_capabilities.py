"""Optional members are declared as capabilities: few are looked up by a constant name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hgms_core.capabilities
from hgms.facts import CAPABILITIES, members_of
from hgms.plugins import KINDS

ROOT = Path(__file__).resolve().parents[2]
MOST = 60
"""The largest number of look-ups by a constant name; lower it if there are fewer."""


def looked_up(source: str) -> list[str]:
    """The constant names in calls of ``hasattr`` and ``getattr``.

    >>> looked_up("getattr(x, 'a', 1) or hasattr(x, 'b') or getattr(x, name)")
    ['a', 'b']
    """
    return [
        node.args[1].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and isinstance(node.args[1].value, str)
    ]


def test_few_members_are_looked_up_by_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("hgms_core", "plugins")
        for path in (ROOT / folder).rglob("*.py")
        for name in looked_up(path.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST, sorted(found)


def test_members_of_capabilities_are_not_looked_up_by_name() -> None:
    kinds = [value for value in vars(hgms_core.capabilities).values() if isinstance(value, type)]
    known = {
        name
        for kind in kinds
        if kind.__module__ == "hgms_core.capabilities"
        for name in members_of(kind)
    }
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("hgms_core", "plugins")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert known & {name for source in sources for name in looked_up(source)} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_component_has_its_capabilities(kind: str) -> None:
    assert CAPABILITIES[kind]
    assert {known.__name__ for known in CAPABILITIES[kind]} <= set(hgms_core.capabilities.__all__)
