"""The project's frame: what is packaged, pinned and contracted is what is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hgms_core

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py"))
LANGUAGE = {"hgms_evaluation", "hgms_less", "hgms_llm", "hgms_mix", "hgms_regmix", "hgms_rho_loss"}
LINTER = PROJECT["tool"]["importlinter"]
CONTRACTS = {contract["id"]: contract for contract in LINTER["contracts"]}


def test_there_are_plugins() -> None:
    assert {"hgms_cg", "hgms_branches", "hgms_task_cleaning"} <= set(PLUGINS)
    assert not (ROOT / "plugins" / "__init__.py").exists()  # a source root, not a package


def test_the_wheel_holds_the_core_and_every_plugin() -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["hgms_core", *(f"plugins/{name}" for name in PLUGINS)]


def test_every_plugin_is_an_entry_point() -> None:
    entries = PROJECT["project"]["entry-points"]["hgms"]
    # hgms_evaluation implements no hook: hgms_mix calls it.
    plugins = [name for name in PLUGINS if name != "hgms_evaluation"]
    assert entries == {name.removeprefix("hgms_").replace("_", "-"): name for name in plugins}


def test_every_plugin_is_under_the_import_contracts() -> None:
    assert LINTER["root_packages"] == ["hgms_core", *PLUGINS]
    # The stages run the benchmarks; what language models share is below the plugins for them.
    apart = {"hgms_mix", "hgms_llm"}
    assert CONTRACTS["plugins"]["layers"] == [
        "hgms_mix",
        " | ".join(name for name in PLUGINS if name not in apart),
        "hgms_llm",
        "hgms_core",
    ]
    others = [name for name in PLUGINS if name not in LANGUAGE]
    assert CONTRACTS["shared"]["source_modules"] == others
    assert CONTRACTS["shared"]["forbidden_modules"] == ["hgms_llm"]
    assert CONTRACTS["public"]["source_modules"] == PLUGINS
    # the one with a command, and the one that writes records of its own
    programs = [f"{name}.** -> hgms_core.running" for name in ("hgms_mix", "hgms_evaluation")]
    assert CONTRACTS["public"]["ignore_imports"] == programs


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_plugin_has_a_readme(plugin: str) -> None:
    text = (ROOT / "plugins" / plugin / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(text.split()) > 40


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == hgms_core.__version__
    assert f"## [{hgms_core.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def _names(requirements: list[str]) -> set[str]:
    """The projects that are required, in canonical spelling, without ourselves."""
    found = {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-") for requirement in requirements}
    return found - {"hgms"}


def _pinned(file: str) -> set[str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return _names(lines)


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = _names(PROJECT["project"]["dependencies"])
    for extra in ("demo", "sklearn", "plot", "test", "docs", "lint"):
        wanted |= _names(extras[extra])
    assert wanted <= _pinned("constraints.txt")
    assert _names(extras["peers"]) <= _pinned("constraints.txt") | _pinned("constraints-peers.txt")
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_importing_the_core_is_light() -> None:
    """No plugin, no command line, no plotting, no data library."""
    code = "import sys, json, hgms_core; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = set(json.loads(shown.stdout))
    assert "torch" in loaded
    assert not loaded & {"transformers", "datasets", "sklearn", "scipy", "matplotlib", "rich", "click", "cattrs", "tomlkit"}
    assert not loaded & set(PLUGINS)
