"""Classes are compared with the protocol of their kind."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import attrs
import pytest
from support.fakes import Site

from hgms.config.tables import overlay
from hgms.plugins import KINDS, Registry, faults_of
from hgms_core import Composition

SOLVER = KINDS["solver"]


def solver_class(solve: object, **namespace: object) -> type:
    tables = type("Made", (), {"solve": solve, "name": "made", **namespace})
    return attrs.frozen(tables)


PARTS = {
    "generator": {"name": "branches"},
    "selector": {"name": "first"},
    "hypergradient": {"name": "h"},
    "outer": {"name": "sgd"},
}


@pytest.mark.parametrize(
    ("solve", "fault"),
    [
        (lambda self, matvec, b, x0=None: b, None),
        (lambda self, matvec, b, x0=None, extra=1: b, None),
        (lambda self, *args, **kwargs: 0, None),
        (lambda self, matvec, b, x0=None, *, extra=1: b, None),
        (
            lambda self, matvec, b: b,
            "its method solve(matvec, b) should be solve(matvec, b, x0=None)",
        ),
        (
            lambda self, b, matvec, x0=None: b,
            "its method solve(b, matvec, x0) should be solve(matvec, b, x0=None)",
        ),
        (
            lambda self, matvec, b, x0: b,
            (
                "its method solve: the parameter 'x0' needs a default (the protocol is "
                "solve(matvec, b, x0=None))"
            ),
        ),
        (
            lambda self, matvec, b, x0=None, *, extra: b,
            (
                "its method solve: the parameter 'extra' needs a default (the protocol is "
                "solve(matvec, b, x0=None))"
            ),
        ),
        (staticmethod(lambda matvec, b, x0=None: b), None),
    ],
)
def test_signatures_are_compared_with_the_protocol(solve: object, fault: str | None) -> None:
    assert faults_of(SOLVER, solver_class(solve)) == ([fault] if fault else [])


def solve(self: object, matvec: object, b: object, x0: object = None) -> object:
    return b


@attrs.frozen
class NoVersion:
    name: ClassVar[str] = "no-version"

    def problem(self, seed: int, device: object, dtype: object) -> None: ...


@pytest.mark.parametrize(
    ("kind", "cls", "faults"),
    [
        ("solver", type("Plain", (), {"solve": solve, "name": "plain"}), ["not an attrs class"]),
        ("solver", solver_class(solve, name=None), ["it has no name; give it a class variable"]),
        ("solver", solver_class(solve, needs="sources"), ["its needs are 'sources'"]),
        ("solver", solver_class(solve, needs=3), ["its needs are 3"]),
        ("solver", solver_class(solve, needs=property(lambda self: {"sources"})), []),
        ("task", NoVersion, ["no class variable 'version'", "no class variable 'metrics'"]),
    ],
)
def test_other_faults_of_a_class(kind: str, cls: type, faults: list[str]) -> None:
    found = faults_of(KINDS[kind], cls)
    assert len(found) == len(faults)
    assert all(part in text for part, text in zip(faults, found, strict=True))


def test_compositions_are_checked_like_classes() -> None:
    good = Composition(name="good", summary="s", source="x", parts=PARTS)
    assert faults_of(KINDS["method"], good) == []
    assert hash(good) == hash(attrs.evolve(good))
    parts = {key: value for key, value in PARTS.items() if key != "outer"} | {"outr": {}}
    bad = attrs.evolve(good, name="Not Good", parts=parts)
    name, unknown, missing = faults_of(KINDS["method"], bad)
    assert "'Not Good' is not in kebab-case" in name
    assert "did you mean 'outer'?" in unknown
    assert missing == "it has no part 'outer'"


BASE: dict[str, Any] = {
    "a": {"name": "x", "deep": {"name": "y", "k": 1, "l": 2}},
    "plain": {"p": 1, "q": 2},
    "keep": "best",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"a": {"deep": {"k": 5}}}, {"a": {"name": "x", "deep": {"name": "y", "k": 5, "l": 2}}}),
        ({"a": {"deep": {"name": "z"}}}, {"a": {"name": "x", "deep": {"name": "z"}}}),
        ({"a": {"deep": "z"}}, {"a": {"name": "x", "deep": {"name": "z"}}}),
        ({"a": {"deep": "y"}}, {}),
        ({"a": {"deep": "none"}}, {"a": {"name": "x", "deep": "none"}}),
        ({"a": {"name": "w"}}, {"a": {"name": "w"}}),
        ({"plain": {"q": 3}, "keep": "last"}, {"plain": {"p": 1, "q": 3}, "keep": "last"}),
    ],
)
def test_overrides_reach_down_and_replace_what_has_another_name(
    change: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = copy.deepcopy(BASE)
    assert overlay(BASE, change) == {**BASE, **expected}
    assert before == BASE


def test_a_registry_has_what_its_own_host_has(site: Site) -> None:
    late = site.solver("late_plugin", "late")
    found = [Registry.load(files).find("solver", "late") for files in ([], [late], [])]
    assert [component is not None for component in found] == [False, True, False]
