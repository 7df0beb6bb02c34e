"""Components are found with their owner, and clashes of names are errors."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.cli.inspect import component_row
from hgms.plugins import Host, Registry
from hgms_core.errors import ConfigError, PluginError


def registry_of(*plugins: Path, tolerant: bool = False) -> Registry:
    return Registry(Host.load(plugins, tolerant=tolerant))


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


@pytest.mark.parametrize(
    ("typed", "suggestions"), [("cgg", ("cg",)), ("CG", ("cg",)), ("zebra", ())]
)
def test_an_unknown_name_gets_a_suggestion_and_the_list(
    site: Site, typed: str, suggestions: tuple[str, ...]
) -> None:
    registry = registry_of(site.solver("one", "cg"), site.solver("two", "minres"))
    with rejects("unknown-linear-solver", of=ConfigError) as caught:
        registry.get("solver", typed)
    assert caught.value.did_you_mean == suggestions
    assert str(caught.value.hint).splitlines()[0] == "available: cg, minres"


def test_a_component_of_another_kind_is_named_with_its_kind(site: Site) -> None:
    with rejects("unknown-method", of=ConfigError) as caught:
        registry_of(site.solver("one", "cg")).get("method", "cg")
    assert str(caught.value.hint).splitlines()[0] == "'cg' is a linear solver"


# before and after ours in the order of loading
@pytest.mark.parametrize("name", ["afast", "zfast"])
def test_a_third_party_cannot_take_the_name_of_one_of_ours(
    site: Site, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.solver("ours_plugin", "cg", cls="CG")
    site.solver("fastcg", "cg", cls="FastCG")
    site.install("hgms", {"cg": "ours_plugin"}, version="0.1.0")
    site.install("hgms-fastcg", {name: "fastcg"}, version="2.1")
    registry = registry_of()
    assert registry.get("solver", "cg").plugin.name == "cg"
    assert registry.host.infos[name].status == "incomplete"
    _, *owners, remedy = str(registry.host.infos[name].error).splitlines()
    assert owners == [
        "  ours_plugin:CG (hgms 0.1.0, plugin 'cg')",
        f"  fastcg:FastCG (hgms-fastcg 2.1, plugin '{name}')",
    ]
    assert f"HGMS_DISABLE_PLUGINS={name}" in remedy
    assert len(caplog.records) == 1
    monkeypatch.setenv("HGMS_DISABLE_PLUGINS", name)  # as advised
    assert registry_of().get("solver", "cg").where == "ours_plugin:CG"
    assert len(caplog.records) == 1


def test_of_two_third_parties_with_one_name_neither_is_guessed(site: Site) -> None:
    for module, name in (("afast", "fast-cg"), ("bfast", "fast-cg"), ("other", "other")):
        site.solver(module, name, cls=module.capitalize())
        site.install(f"hgms-{module}", {module: module})
    registry = registry_of()
    # what has nothing to do with it works
    assert [target.name for target in registry.components("solver")] == ["other"]
    with rejects("duplicate-name", of=PluginError) as caught:
        registry.get("solver", "fast-cg")
    assert str(caught.value.hint).splitlines()[:2] == [
        "afast:Afast (hgms-afast 1.0, plugin 'afast')",
        "bfast:Bfast (hgms-bfast 1.0, plugin 'bfast')",
    ]
    assert "HGMS_DISABLE_PLUGINS=bfast" in str(caught.value.hint)


def test_an_incomplete_class_is_an_error_in_a_named_file_and_of_a_third_party_one_warning(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    file = site.module("half", INCOMPLETE)
    with rejects("incomplete-component", of=PluginError) as caught:
        registry_of(file)
    message, name, method = caught.value.lines()
    assert f"plugin 'half' (file {file})" in message
    assert ("'Half_Solver'" in name, "solve(matvec, b, x0=None)" in method) == (True, True)
    site.install("hgms-half", {"half": "half"})
    registry = registry_of()
    assert [item.name for item in registry.components("solver")] == ["whole"]
    assert registry.host.infos["half"].status == "incomplete"
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage().startswith("plugin 'half' (hgms-half 1.0): half:Half ")


@pytest.mark.parametrize(
    ("returned", "code", "shown"),
    [
        ("None", "wrong-hook-result", "NoneType"),
        ("'abc'", "wrong-hook-result", "str"),
        ("int", "wrong-hook-result", "the class int"),
        ("1 / 0", "plugin-failed", "ZeroDivisionError: division by zero"),
        ("__import__('sys').exit(3)", "plugin-failed", "SystemExit"),
        ("[3]", "incomplete-component", "3 is not a task"),
    ],
)
def test_a_hook_that_returns_something_else(
    site: Site, returned: str, code: str, shown: str
) -> None:
    hook = f"@hookimpl\ndef hgms_register_tasks(): return {returned}\n"
    with rejects(code, of=PluginError) as caught:
        registry_of(site.module("odd", f"from hgms_core import hookimpl\n{hook}"))
    assert shown in caught.value.message
