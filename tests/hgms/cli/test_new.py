"""``hgms new plugin``: what it writes for each kind, and what it refuses."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.fakes import Site

from hgms.cli import main
from hgms.cli.new.command import TESTED_WITH
from hgms.plugins import host as plugins
from hgms.plugins import registry
from hgms.testing.methods import check_optimum
from hgms_core import PLUGIN_API

FILES = {
    ".github/workflows/tests.yml",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "run.toml",
    "src/hgms_my_own.py",
    "tests/test_conformance.py",
    "tests/test_hgms_my_own.py",
}


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in ("new", "plugin", *arguments)])


def written(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


def whole(texts: dict[str, str], files: set[str]) -> None:
    """Nothing of the template is left, and what is Python can be read."""
    assert set(texts) == files
    for place, text in texts.items():
        assert text.strip(), place
        assert not re.search(r"@\w+@|tmpl", text), place
        if place.endswith(".py"):
            ast.parse(text)


@pytest.mark.parametrize("kind", registry.KINDS)
def test_the_project_is_a_plugin_with_one_component_of_the_kind(
    site: Site, tmp_path: Path, kind: str
) -> None:
    done = call("my-own", "--kind", kind, "--into", tmp_path / "new folder", "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    folder = tmp_path / "new folder" / "hgms-my-own"
    assert (answer["folder"], set(answer["files"])) == (str(folder), FILES)
    texts = written(folder)
    whole(texts, FILES)
    about = tomllib.loads(texts["pyproject.toml"])["project"]
    assert (about["name"], about["dependencies"]) == ("hgms-my-own", ["hgms>=0.9.0.dev0,<0.10"])
    assert about["entry-points"] == {"hgms": {"my-own": "hgms_my_own"}}
    source, readme = texts["src/hgms_my_own.py"], texts["README.md"]
    hook = registry.KINDS[kind].hook
    loaded = registry.Registry(plugins.Host.load([site.module("hgms_my_own", source)]))
    component = loaded.get(kind, "my-own")
    assert (component.plugin.status, component.plugin.hooks) == ("loaded", (hook,))
    assert component.where.endswith("hgms_my_own:MyOwn")
    assert re.findall(r"^hgms_plugin_api = (\d+)$", source, re.MULTILINE) == [str(PLUGIN_API)]
    # the README says what to type; CI and tests ask for the class
    commands = ["pip install -e '.[test]'", "pytest", "hgms check hgms_my_own:MyOwn"]
    assert all(part in readme for part in (*commands, f"hgms describe {kind} my-own"))
    assert set(commands) <= set(re.findall(r"- run: (.*)", texts[".github/workflows/tests.yml"]))
    seen = texts["tests/test_conformance.py"]
    assert f"assert MyOwn in plugin.{hook}()" in seen


def test_what_a_method_draws_by_its_name_is_good_enough_under_any(
    site: Site, tmp_path: Path
) -> None:
    """Its draws come from a key with its name: the settings of the test must not need luck."""
    settings = TESTED_WITH["method"]
    for number in range(2):
        name = f"walk-{number}"
        assert call(name, "--kind", "method", "--into", tmp_path).exit_code == 0
        file = tmp_path / f"hgms-{name}" / "src" / f"hgms_walk_{number}.py"
        cls: Any = registry.Registry(plugins.Host.load([file])).get("method", name).target
        check_optimum(eval(f"cls({settings})", {"cls": cls}))


@pytest.mark.parametrize(
    ("name", "kind", "place", "near"),
    [
        ("My_Solver", "solver", "NAME", "kebab case"),
        ("MySolver", "solver", "NAME", "kebab case"),
        ("2fast", "solver", "NAME", "kebab case"),
        ("42", "solver", "NAME", ""),
        ("a/b", "solver", "NAME", "kebab case"),
        ("", "solver", "NAME", ""),
        ("hgms-mine", "solver", "NAME", "kebab case"),
        ("mine", "solvr", "--kind", "'solver'?"),
        ("mine", "solver,generator", "--kind", ""),
        ("fast", "solver", "NAME", "hgms-fake 3.0"),
        ("pipeline", "method", "NAME", "of hgms "),
        ("core", "task", "NAME", "hgms_core"),
    ],
)
def test_names_and_kinds_that_are_refused(
    site: Site, tmp_path: Path, name: str, kind: str, place: str, near: str
) -> None:
    site.solver("fake_plugin", "fast")
    site.install("hgms-fake", {"fake": "fake_plugin"}, version="3.0")
    done = call(name, "--kind", kind, "--into", tmp_path / "new")
    assert (done.exit_code, done.stdout) == (2, "")
    assert all(part in done.stderr for part in (f"({place})", near))
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_in_it_is_left_alone(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "hgms-mine"
    folder.mkdir()
    assert call("mine", "--into", tmp_path).exit_code == 0  # an empty one is as good as none
    before = written(folder)
    done = call("mine", "--kind", "task", "--into", tmp_path)
    assert (done.exit_code, f"({folder})" in done.stderr) == (2, True)
    assert written(folder) == before
