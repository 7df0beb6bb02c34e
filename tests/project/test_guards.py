"""Each fault that was found from outside keeps its test: the tables of tests/README.md name it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

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
ROW = re.compile(r"\| ([A-Z][A-Z0-9-]*\d) \| (.+?) \| (.+) \|")
TEST = r"[\w/]+\.py(::\w+){1,2}"
GUARD = re.compile(rf"(?=.)(?P<tests>{TEST}(, {TEST})*)?((^|; )none: .{{10,}})?")


def tables() -> dict[str, list[tuple[str, str]]]:
    """(id, guard) of each row below each heading."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in (TESTS / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        rows = [line for line in lines if line.startswith("|")][2:]
        matches = [ROW.fullmatch(row) or pytest.fail(f"no row of this form: {row}") for row in rows]
        found[heading] = [(match[1], match[3]) for match in matches]
    return found


def guards(text: str) -> list[str]:
    match = GUARD.fullmatch(text)
    assert match, f"neither tests nor 'none: ' with a reason: {text!r}"
    return match["tests"].split(", ") if match["tests"] else []


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


def test_every_fault_has_one_row() -> None:
    expected = {
        heading: [f"{prefix}{n}" for prefix, count in ids for n in range(1, count + 1)]
        for heading, ids in FAULTS.items()
    }
    assert {heading: [row for row, _ in rows] for heading, rows in tables().items()} == expected


def test_every_guard_exists() -> None:
    lost = [
        f"{fault}: {test}"
        for rows in tables().values()
        for fault, text in rows
        for test in guards(text)
        if not is_there(test)
    ]
    assert not lost, "name the test that replaces it in tests/README.md:\n" + "\n".join(lost)
