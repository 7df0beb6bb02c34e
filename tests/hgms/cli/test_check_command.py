"""`hgms check`: a good class, each fault of a class by the check that fails, what is not found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.fakes import Site, call

HEAD = """
from typing import ClassVar
from attrs import define, frozen
"""
CLASS = """
@{decorator}
class Mine:
    {doc}
    name: ClassVar[str] = "mine"
    {field}
    def solve(self, matvec, b, x0=None): return b
"""
DOC = '"""Mine.\n\n    >>> 1\n    1\n    """'
FROZEN = "frozen(kw_only=True)"
FAULTY = [
    (FROZEN, '"""Mine."""', "", "docstring"),
    (FROZEN, "", "", "docstring"),
    ("define(kw_only=True)", DOC, "rtol: float = 1.0", "frozen"),
    (FROZEN, DOC, "rtol: float", "construction"),
    (FROZEN, DOC, "rtol: list[int] = [1]", "hashable"),
    (FROZEN, DOC, "rtol: object = print", "toml"),
    (FROZEN, DOC, "rtol: int = 1.5", "toml"),
    (FROZEN, DOC, "rtol: 'Nowhere' = 1", "types"),
    (FROZEN, DOC, "eta = 0.5", "types"),
    ("(lambda cls: cls)", DOC, "", "registration"),
    (FROZEN, DOC, "needs = {'source'}", "registration"),
]


def source(decorator: str = FROZEN, doc: str = DOC, field: str = "") -> str:
    return CLASS.format(decorator=decorator, doc=doc, field=field)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One module for all of them: what importing it does is seen from an interpreter of its own,
    which takes a second.
    """
    file = tmp_path_factory.mktemp("faulty") / "mine.py"
    classes = [source(*row[:3]).replace("Mine:", f"Mine{i}:") for i, row in enumerate(FAULTY)]
    file.write_text(HEAD + "".join(classes))
    return file


@pytest.mark.parametrize(("number", "check"), [(i, row[3]) for i, row in enumerate(FAULTY)])
def test_the_check_that_fails_is_named(site: Site, faulty: Path, number: int, check: str) -> None:
    done = call("check", f"{faulty}:Mine{number}", "--json")
    results = json.loads(done.stdout)["results"]
    assert done.exit_code == 1
    assert check in {result["check"] for result in results if result["fault"]}


def test_a_good_class_passes(fake: Site) -> None:
    solver = f"{Path(__file__).parents[2] / 'support' / 'kit_parts.py'}:MinimalResidual"
    done = call("check", solver)
    assert done.exit_code == 0
    first, *_, last = done.stdout.splitlines()
    assert first == f"{solver}: a linear solver"
    assert re.fullmatch(r"\d+ passed(, \d+ not asked)?", last)


def test_what_cannot_be_found(site: Site) -> None:
    file = site.module("mine", "class Mine: pass\n")
    for spec, place, near in (
        ("mine", "(MODULE:CLASS)", "'mine'"),
        (f"{file}:Mne", f"({file})", "'Mine'"),
        (f"{file}:Mine", ":Mine)", "solver: solve"),
        ("no_such_module:Mine", "(no_such_module)", "ModuleNotFoundError"),
    ):
        done = call("check", spec)
        assert (done.exit_code, done.stdout) == (2, "")
        assert all(part in done.stderr for part in (place, near))
