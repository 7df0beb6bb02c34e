"""Classes are compared with the protocol of their kind."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.cli.inspect import kind_called
from hgms.config.invalid import kinds_of
from hgms_core import Composition, overlay
from hgms_core.errors import ConfigError
from hgms_core.pipeline import Pipeline
from hgms_core.registry import KINDS, Registry, faults_of

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


def test_other_faults_of_a_class() -> None:
    def solve(self: object, matvec: object, b: object, x0: object = None) -> object:
        return b

    plain = type("Plain", (), {"solve": solve, "name": "plain"})
    unmarked = (
        "it is not an attrs class; put @frozen(kw_only=True) above it, of hgms.config or of attrs"
    )
    assert faults_of(SOLVER, plain) == [unmarked]
    assert faults_of(SOLVER, solver_class(solve, name=None)) == [
        'it has no name; give it a class variable: name: ClassVar[str] = "my-name"'
    ]

    for names in ("sources", 3):
        fault = f"its needs are {names!r}; write a set of names, such as frozenset({{'sources'}})"
        assert faults_of(SOLVER, solver_class(solve, needs=names)) == [fault]
    assert faults_of(SOLVER, solver_class(solve, needs=property(lambda self: {"sources"}))) == []

    @attrs.frozen
    class NoVersion:
        name: ClassVar[str] = "no-version"

        def problem(self, seed: int, device: object, dtype: object) -> None: ...

    assert faults_of(KINDS["task"], NoVersion) == [
        "it has no class variable 'version'",
        "it has no class variable 'metrics'",
    ]


def test_a_class_is_recognised_by_its_methods() -> None:
    assert [kind.name for kind in kinds_of(solver_class(lambda self, matvec, b, x0=None: b))] == [
        "solver"
    ]
    assert [kind.name for kind in kinds_of(Pipeline)] == ["method"]


def test_kinds_by_name() -> None:
    assert kind_called("solvers") is kind_called("Solver") is SOLVER
    with rejects("unknown-kind", of=ConfigError) as caught:
        kind_called("solvr")
    assert caught.value.did_you_mean == ("solver",)


def test_compositions_are_checked_like_classes() -> None:
    kind = KINDS["method"]
    good = Composition(name="good", summary="s", source="x", parts=PARTS)
    assert faults_of(kind, good) == []
    assert hash(good) == hash(attrs.evolve(good))
    assert faults_of(kind, attrs.evolve(good, name="Not Good")) == [
        "its name 'Not Good' is not in kebab-case (like 'my-name')"
    ]
    bad = {key: value for key, value in PARTS.items() if key != "outer"} | {"outr": {}}
    unknown, missing = faults_of(kind, attrs.evolve(good, parts=bad))
    assert "'outr'" in unknown
    assert "did you mean 'outer'?" in unknown
    assert "answer, generator, hypergradient, keep, outer, selector" in unknown
    assert missing == "it has no part 'outer'"


def test_overrides_reach_down_and_replace_what_has_another_name() -> None:
    base = {
        "a": {"name": "x", "deep": {"name": "y", "k": 1, "l": 2}},
        "plain": {"p": 1, "q": 2},
        "keep": "best",
    }
    kept = {
        "a": {"name": "x", "deep": {"name": "y", "k": 1, "l": 2}},
        "plain": {"p": 1, "q": 2},
        "keep": "best",
    }
    assert overlay(base, {"a": {"deep": {"k": 5}}})["a"] == {
        "name": "x",
        "deep": {"name": "y", "k": 5, "l": 2},
    }
    assert overlay(base, {"a": {"deep": {"name": "z"}}})["a"] == {
        "name": "x",
        "deep": {"name": "z"},
    }
    assert overlay(base, {"a": {"deep": "z"}})["a"]["deep"] == {"name": "z"}
    assert overlay(base, {"a": {"deep": "y"}})["a"]["deep"] == {"name": "y", "k": 1, "l": 2}
    assert overlay(base, {"a": {"deep": "none"}})["a"]["deep"] == "none"
    assert overlay(base, {"a": {"name": "w"}})["a"] == {"name": "w"}
    assert overlay(base, {"plain": {"q": 3}, "keep": "last"}) == {
        **kept,
        "plain": {"p": 1, "q": 3},
        "keep": "last",
    }
    assert base == kept, "the base is left alone"


def test_a_registry_has_what_its_own_host_has(site: Site) -> None:
    late = site.solver("late_plugin", "late")
    assert Registry.load().find("solver", "late") is None
    assert Registry.load([late]).find("solver", "late") is not None
    assert Registry.load().find("solver", "late") is None, "nothing is kept between two"


def test_every_hook_of_a_kind_is_specified() -> None:
    from hgms_core import hookspecs

    assert all(hasattr(hookspecs, kind.hook) for kind in KINDS.values())
