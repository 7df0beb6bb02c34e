"""Each fault that external tests found keeps its test: tests/faults.toml names it."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
FAULTS = {
    "Reports about comparable tools": [("PR-F", 12), ("P", 12)],
    "New users": [("U", 16)],
    "Numbers": [("N", 9)],
    "Reliability": [("R", 27)],
    "Language models": [("LM-F", 21)],
    "GPU": [("G", 7)],
    "Test suites of peers": [("T", 6)],
}
"""The first letters of the ids below each heading, and how many there are."""
TABLES: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    (TESTS / "faults.toml").read_text(encoding="utf-8")
)


@functools.cache
def defined(file: str) -> set[str]:
    """The tests of a file, those of a class with the name of the class in front."""
    path = TESTS / file
    if not path.is_file():
        return set()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}::{method.name}" for method in methods}
    return names


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    collected = Path(file).name.startswith("test_") and name.split("::")[-1].startswith("test_")
    return collected and name in defined(file)


def test_every_fault_has_one_entry() -> None:
    expected = {
        heading: [f"{prefix}{n}" for prefix, count in ids for n in range(1, count + 1)]
        for heading, ids in FAULTS.items()
    }
    assert {heading: list(entries) for heading, entries in TABLES.items()} == expected


@pytest.mark.parametrize("heading", FAULTS)
def test_every_entry_names_tests_or_a_reason(heading: str) -> None:
    for fault, entry in TABLES[heading].items():
        assert set(entry) <= {"fault", "tests", "missing"}, fault
        assert entry["fault"], fault
        assert entry.get("tests") or len(entry.get("missing", "")) >= 10, fault


def test_every_guard_exists() -> None:
    lost = [
        f"{fault}: {test}"
        for entries in TABLES.values()
        for fault, entry in entries.items()
        for test in entry.get("tests", [])
        if not is_there(test)
    ]
    assert not lost, "name the test that replaces it in tests/faults.toml:\n" + "\n".join(lost)
