"""No file imports one that leads back to it, and no layer one above it. Imports inside functions
and for type checkers count: who reads a file has to read what it imports.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import contracts
import networkx  # torch requires it
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = (ROOT / "hgms_core", ROOT / "plugins" / "hgms", ROOT / "plugins" / "hgms_mix")

Graph = Mapping[str, Iterable[str]]


def modules_below(tops: Iterable[Path]) -> dict[str, Path]:
    """The files of packages, by the names of their modules."""
    found = {}
    for top in tops:
        for path in top.rglob("*.py"):
            name = ".".join(path.relative_to(top.parent).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports_of(name: str, path: Path) -> Iterator[str]:
    """The dotted names that a module asks for; ``from a import b`` asks for ``a.b``."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            start = parents[: len(parents) + 1 - node.level] if node.level else []
            base = [*start, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)


def graph_of(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Which module imports which others of these."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        asked = imports_of(name, path)
        modules = (full if full in files else full.rpartition(".")[0] for full in asked)
        graph[name] = {module for module in modules if module in files} - {name}
    return graph


def cycles(graph: Graph) -> set[frozenset[str]]:
    """The largest sets of modules of which each leads to every other."""
    parts = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return {frozenset(part) for part in parts if len(part) > 1}


def upward(graph: Graph, container: str, layers: list[list[str]]) -> list[str]:
    """The imports from a package of ``container`` of one that is no layer below its own; the first
    layer is the highest.
    """
    prefix = f"{container}." if container else ""
    ranks = {f"{prefix}{name}": rank for rank, row in enumerate(layers) for name in row}
    depth = prefix.count(".") + 1

    def package(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    return [
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if package(name) != package(target)
        and package(name) in ranks
        and package(target) in ranks
        and ranks[package(target)] <= ranks[package(name)]
    ]


HGMS = [*contracts.PROGRAMS, *contracts.COMPONENTS, *contracts.LIBRARIES]


@pytest.mark.extended
def test_layers_import_what_is_below_them_and_no_cycle_comes() -> None:
    files = modules_below(TOPS)
    graph = graph_of(files)
    assert not cycles(graph)
    for container, layers in (("", contracts.WHEEL), ("hgms", HGMS), ("hgms_mix", contracts.MIX)):
        assert not upward(graph, container, layers)
        there = {name.rpartition(".")[2] for name in files if name.rpartition(".")[0] == container}
        assert there == {name for row in layers for name in row}


@pytest.mark.extended
def test_the_contracts_hold() -> None:
    """Those of import-linter, which do not count imports for type checkers."""
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "project" / "contracts.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# --- the code above, on packages that are not ours
