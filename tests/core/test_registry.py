"""The registry: what may be registered, what a name finds, and what is said when it finds
nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.cli.inspect import component_row, component_rows, kind_called
from hgms.config.invalid import kinds_of
from hgms_core import Composition, overlay
from hgms_core.errors import ConfigError, PluginError
from hgms_core.host import Host
from hgms_core.pipeline import Pipeline
from hgms_core.registry import KINDS, Registry, faults_of

SOLVER = KINDS["solver"]


def registry_of(*plugins: Path, tolerant: bool = False) -> Registry:
    return Registry(Host.load(plugins, tolerant=tolerant))


def test_a_component_is_found_with_its_owner(site: Site) -> None:
    site.solver("plug", "mine")
    site.install("hgms-mine", {"mine-plugin": "plug"}, version="2.1")
    component = registry_of().get("solver", "mine")
    assert component_row(component) == {
        "kind": "solver",
        "name": "mine",
        "maturity": "third party",
        "plugin": "mine-plugin",
        "distribution": "hgms-mine",
        "version": "2.1",
        "summary": "Solves nothing, politely.",
        "status": "available",
        "install": None,
    }
    assert component.where == "plug:Solver"


def test_the_pipeline_is_a_method_without_any_plugin(site: Site) -> None:
    assert [item.name for item in registry_of().components()] == ["pipeline"]
    assert registry_of().get("method", "pipeline").target is Pipeline


@pytest.mark.parametrize(
    ("typed", "suggestions"), [("cgg", ("cg",)), ("CG", ("cg",)), ("zebra", ())]
)
def test_an_unknown_name_gets_a_suggestion_and_the_list(
    site: Site, typed: str, suggestions: tuple[str, ...]
) -> None:
    registry = registry_of(site.solver("one", "cg"), site.solver("two", "minres"))
    with rejects("unknown-linear-solver", of=ConfigError) as caught:
        registry.get("solver", typed)
    error = caught.value
    assert repr(typed) in error.message
    assert error.did_you_mean == suggestions
    assert error.hint is not None
    assert error.hint.splitlines()[0] == "available: cg, minres"
    assert "`hgms list solver`" in error.hint


def test_an_unknown_name_tells_of_plugins_that_did_not_load(site: Site) -> None:
    site.module("plug", "import no_such_module\n")
    site.install(
        "hgms-math",
        {"math": "plug"},
        extras=["math"],
        requires=['no-such-module; extra == "math"', "hgms>=0.1"],
    )
    with rejects("unknown-task", of=ConfigError) as caught:
        registry_of().get("task", "maths")
    assert str(caught.value) == (
        "unknown task 'maths'\n"
        "  available: (none)\n"
        "  note: plugin 'math' (hgms-math 1.0) did not load: ModuleNotFoundError: No module "
        "named 'no_such_module'\n"
        "  install it: pip install 'hgms-math[math]'\n"
        "  run `hgms list task` for their descriptions"
    )


def test_a_plugin_without_its_extra_is_listed_and_an_unknown_name_says_what_to_install(
    site: Site,
) -> None:
    site.module("plug", "import no_such_module\n")
    site.install(
        "hgms",
        {"fast": "plug"},
        version="0.1.0",
        extras=["sklearn"],
        requires=['no-such-module; extra == "sklearn"'],
    )
    registry = registry_of()
    assert component_rows(registry, "solver") == [
        {
            "kind": "plugin",
            "name": "fast",
            "maturity": None,
            "plugin": "fast",
            "distribution": "hgms",
            "version": "0.1.0",
            "summary": "ModuleNotFoundError: No module named 'no_such_module'",
            "status": "missing-extra",
            "install": "pip install 'hgms[sklearn]'",
        }
    ]
    with rejects("unknown-linear-solver", of=ConfigError) as caught:
        registry.get("solver", "faster")
    assert caught.value.hint is not None
    assert "'fast' (hgms 0.1.0)" in caught.value.hint
    assert "pip install 'hgms[sklearn]'" in caught.value.hint


# before and after ours in the order of loading
@pytest.mark.parametrize("name", ["afast", "zfast"])
def test_a_third_party_cannot_take_the_name_of_one_of_ours(
    site: Site, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    site.solver("ours_plugin", "cg", cls="CG")
    site.solver("fastcg", "cg", cls="FastCG")
    site.install("hgms", {"cg": "ours_plugin"}, version="0.1.0")
    site.install("hgms-fastcg", {name: "fastcg"}, version="2.1")
    registry = registry_of()
    assert registry.get("solver", "cg").plugin.name == "cg"
    assert registry.host.infos[name].status == "incomplete"
    error = registry.host.infos[name].error
    assert error is not None
    message, *owners, remedy = error.splitlines()
    assert "'cg'" in message
    assert "hgms 0.1.0 is used" in message
    assert owners == [
        "  ours_plugin:CG  (hgms 0.1.0, plugin 'cg')",
        f"  fastcg:FastCG   (hgms-fastcg 2.1, plugin '{name}')",
    ]
    assert f"HGMS_DISABLE_PLUGINS={name}" in remedy
    assert len(caplog.records) == 1


def test_of_two_third_parties_with_one_name_neither_is_guessed(site: Site) -> None:
    for module in ("afast", "bfast"):
        site.solver(module, "fast-cg", cls=module.capitalize())
        site.install(f"hgms-{module}", {module: module})
    site.solver("other", "other")
    site.install("hgms-other", {"other": "other"})
    registry = registry_of()
    # what has nothing to do with it works
    assert registry.get("solver", "other").plugin.name == "other"
    assert [target.name for target in registry.components("solver")] == ["other"]
    with rejects("duplicate-name", of=PluginError) as caught:
        registry.get("solver", "fast-cg")
    assert caught.value.place == ()
    assert caught.value.hint is not None
    assert caught.value.hint.splitlines()[:2] == [
        "afast:Afast  (hgms-afast 1.0, plugin 'afast')",
        "bfast:Bfast  (hgms-bfast 1.0, plugin 'bfast')",
    ]
    assert "HGMS_DISABLE_PLUGINS=bfast" in caught.value.hint


def test_a_file_of_one_s_own_that_takes_a_name_is_an_error_at_once(site: Site) -> None:
    site.solver("ours_plugin", "cg", cls="CG")
    site.install("hgms", {"cg": "ours_plugin"}, version="0.1.0")
    file = site.solver("mine", "cg")
    with rejects("duplicate-name", of=PluginError) as caught:
        registry_of(file)
    remedy = caught.value.lines()[-1]
    assert str(file) in remedy
    assert "HGMS_DISABLE_PLUGINS=cg" in remedy


def test_blocking_as_advised_resolves_the_clash(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.solver("ours_plugin", "cg")
    site.solver("fastcg", "cg")
    site.install("hgms", {"cg": "ours_plugin"}, version="0.1.0")
    site.install("hgms-fastcg", {"fast": "fastcg"})
    monkeypatch.setenv("HGMS_DISABLE_PLUGINS", "fast")
    assert registry_of().get("solver", "cg").where == "ours_plugin:Solver"


INCOMPLETE = '''
from typing import ClassVar
from attrs import frozen
from hgms_core import hookimpl

@frozen(kw_only=True)
class Half:
    """Half a solver."""
    name: ClassVar[str] = "Half_Solver"

@frozen(kw_only=True)
class Whole:
    """A whole one."""
    name: ClassVar[str] = "whole"
    def solve(self, matvec, b, x0=None): return b

@hookimpl
def hgms_register_linear_solvers():
    return [Half, Whole]
'''


def test_an_incomplete_class_in_a_named_file_is_an_error(site: Site) -> None:
    file = site.module("half", INCOMPLETE)
    with rejects("incomplete-component", of=PluginError) as caught:
        registry_of(file)
    message, *faults = caught.value.lines()
    assert f"plugin 'half' (file {file})" in message
    assert "hgms_file_half:Half" in message
    assert len(faults) == 2
    assert "'Half_Solver'" in faults[0]
    assert "solve(matvec, b, x0=None)" in faults[1]


def test_an_incomplete_class_of_a_third_party_is_dropped_with_one_warning(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.module("half", INCOMPLETE)
    site.install("hgms-half", {"half": "half"})
    registry = registry_of()
    assert [item.name for item in registry.components("solver")] == ["whole"]
    assert registry.host.infos["half"].status == "incomplete"
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert warning.startswith("plugin 'half' (hgms-half 1.0): half:Half ")
    assert "'Half_Solver'" in warning
    assert "solve(matvec, b, x0=None)" in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("returned", "code", "shown"),
    [
        ("None", "wrong-hook-result", "NoneType"),
        ("'abc'", "wrong-hook-result", "str"),
        ("int", "wrong-hook-result", "the class int"),
        ("1 / 0", "plugin-failed", "ZeroDivisionError: division by zero"),
        ("[3]", "incomplete-component", "3 is not a task"),
    ],
)
def test_a_hook_that_returns_something_else(
    site: Site, returned: str, code: str, shown: str
) -> None:
    file = site.module(
        "odd",
        (
            "from hgms_core import hookimpl\n@hookimpl\n"
            f"def hgms_register_tasks(): return {returned}\n"
        ),
    )
    with rejects(code, of=PluginError) as caught:
        registry_of(file)
    assert shown in caught.value.message
    if code != "incomplete-component":
        assert "hgms_register_tasks" in caught.value.message


def solver_class(solve: object, **namespace: object) -> type:
    tables = type("Made", (), {"solve": solve, "name": "made", **namespace})
    return attrs.frozen(tables)


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


PARTS = {
    "generator": {"name": "branches"},
    "selector": {"name": "first"},
    "hypergradient": {"name": "h"},
    "outer": {"name": "sgd"},
}


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
