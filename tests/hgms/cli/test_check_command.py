"""`hgms check`: a good class, each fault of a class by the check that fails, what is not found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.fakes import Site, call, json_of
from support.helpers import rejects

from hgms.plugins import Registry
from hgms.testing.check import check, target_of
from hgms_core import Composition, ConfigError

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
    assert re.fullmatch(r"\d+ passed(, \d+ skipped)?", last)


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
        assert done.stderr.count("MODULE:CLASS") <= 1, "the form is printed once"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.load()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A composition of a generator that the same module registers."""
    file = tmp_path_factory.mktemp("plugin") / "own.py"
    source = (Path(__file__).parents[2] / "ranks" / "own_plugin.py").read_text()
    file.write_text(source + "\nBY_POINTS = hgms_register_methods()[0]\n")
    return file


@pytest.mark.parametrize(
    ("spec", "kind", "name"),
    [
        ("cg", "solver", "cg"),
        ("generator:soba", "generator", "soba"),
        ("method:soba", "method", "soba"),
        ("hgms.solvers:CG", "solver", "cg"),
        ("{}:Around", "generator", "around"),
        ("{}:hg-around", "method", "hg-around"),
        ("{}:BY_POINTS", "method", "hg-around"),
    ],
)
def test_a_target_is_a_registered_name_or_of_a_module(
    spec: str, kind: str, name: str, registry: Registry, plugin: Path
) -> None:
    found, target, parts = target_of(spec.format(plugin), registry)
    assert (found.name, target.name) == (kind, name)
    assert registry.find("generator", "around") is None
    assert (parts.find("generator", "around") is not None) == (name == "hg-around")


@pytest.mark.parametrize(
    ("spec", "code", "near"),
    [
        ("soba", "ambiguous-name", ()),
        ("minress", "unknown-component", ("minres",)),
        ("zzzzzzzzzz", "unknown-component", ()),
        ("mine.py", "wrong-value", ()),
        ("Mine", "wrong-value", ()),
        ("mine:not a name", "wrong-value", ()),
        (":Mine", "wrong-value", ()),
    ],
)
def test_what_names_no_target_is_refused(
    spec: str, code: str, near: tuple[str, ...], registry: Registry
) -> None:
    with rejects(code, "MODULE:CLASS", of=ConfigError) as caught:
        target_of(spec, registry)
    assert caught.value.did_you_mean == near


@pytest.mark.extended
def test_a_composition_passes_the_checks_of_methods(registry: Registry) -> None:
    _, target, parts = target_of("theta0", registry)
    first, *_ = results = list(check(target, registry=parts))
    assert first.check == "registration"
    assert not [result for result in results if result.fault]
    assert {"docstring", "source", "construction", "optimum"} <= {each.check for each in results}


def test_a_composition_that_says_nothing_of_an_unknown_part_fails(registry: Registry) -> None:
    parts = {"generator": {"name": "no-such"}}
    wrong = Composition(name="wrong", summary=" ", source=" ", parts=parts)
    faults = {result.check: result.fault for result in check(wrong, registry=registry)}
    assert faults.keys() == {"registration", "docstring", "source", "construction"}
    assert all(faults[name] for name in ("docstring", "source", "construction"))


@pytest.mark.extended
def test_excuses_and_what_was_not_asked_are_told_apart() -> None:
    spec = "hgms.solvers:Identity"
    rows = json_of("check", spec)["results"]
    first, *lines, last = call("check", spec).stdout.splitlines()
    assert first.startswith(spec)
    labels = {"but": "excuse", "-": "skipped"}
    for row, line in zip(rows, lines, strict=True):
        label, name = line.replace(":", " ").split()[:2]
        assert name == row["check"]
        assert label == next((short for short, long in labels.items() if row[long]), "ok")
    counts = [sum(bool(row[long]) for row in rows) for long in labels.values()]
    assert [int(number) for number in re.findall(r"\d+", last)] == [
        len(rows) - sum(counts),
        *counts,
    ]
