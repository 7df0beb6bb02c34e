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
from hgms.cli.new.command import TESTED_WITH, kebab
from hgms.testing.methods import check_optimum
from hgms_core import PLUGIN_API, registry
from hgms_core import host as plugins

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


@pytest.fixture(params=list(registry.KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def texts(kind: str, site: Site, tmp_path: Path) -> dict[str, str]:
    done = call("my-own", "--kind", kind, "--into", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["hgms-my-own"]
    return written(tmp_path / "new" / "hgms-my-own")


def test_the_files(texts: dict[str, str]) -> None:
    assert set(texts) == FILES
    assert all(text.strip() and text.endswith("\n") for text in texts.values())


def test_nothing_of_the_template_is_left(texts: dict[str, str]) -> None:
    for place, text in texts.items():
        assert not re.search(r"@\w+@|tmpl", text), place
        if place.endswith(".py"):
            ast.parse(text)
    assert tomllib.loads(texts["run.toml"])["budget"]


def test_the_project_is_a_plugin_of_that_name(texts: dict[str, str]) -> None:
    project = tomllib.loads(texts["pyproject.toml"])
    assert project["project"]["name"] == "hgms-my-own"
    assert project["project"]["entry-points"] == {"hgms": {"my-own": "hgms_my_own"}}
    assert project["project"]["dependencies"] == ["hgms>=0.9.0.dev0,<0.10"]
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [
        "src/hgms_my_own.py"
    ]
    assert project["project"]["optional-dependencies"]["test"]
    assert project["project"]["description"] in texts["README.md"]


def test_the_module_has_one_component_of_the_kind(
    kind: str, texts: dict[str, str], site: Site
) -> None:
    host = plugins.Host.load([site.module("hgms_my_own", texts["src/hgms_my_own.py"])])
    (component,) = [
        item
        for item in registry.Registry(host).components(kind)
        if item.plugin.name == "hgms_my_own"
    ]
    assert (component.name, component.plugin.status, component.plugin.hooks) == (
        "my-own",
        "loaded",
        (registry.KINDS[kind].hook,),
    )
    assert isinstance(component.target, type)
    assert component.target.__name__ == "MyOwn"
    (api,) = re.findall(r"^hgms_plugin_api = (\d+)$", texts["src/hgms_my_own.py"], re.MULTILINE)
    assert int(api) == PLUGIN_API


def test_the_readme_says_where_the_method_is_from_and_what_to_type(
    kind: str, texts: dict[str, str]
) -> None:
    readme = texts["README.md"]
    headings = re.findall(r"^#+ (.*)$", readme, re.MULTILINE)
    assert headings == ["hgms-my-own", "Source", "Equations", "Deviations"]
    for command in (
        "pip install -e '.[test]'",
        "pytest",
        "hgms check hgms_my_own:MyOwn",
        f"hgms describe {kind} my-own",
    ):
        assert command in readme
    source = re.search(
        r"^    Source: (.*?)\n    \"\"\"", texts["src/hgms_my_own.py"], re.MULTILINE | re.DOTALL
    )
    assert source is not None
    assert source[1].split(",")[0] in readme


def test_ci_and_tests_ask_for_that_class(kind: str, texts: dict[str, str]) -> None:
    ci = texts[".github/workflows/tests.yml"]
    runs = re.findall(r"- run: (.*)", ci)
    assert runs[:2] == ["pip install -e '.[test]'", "pytest"]
    assert "hgms check hgms_my_own:MyOwn" in runs
    assert "${{ matrix.python-version }}" in ci
    seen = texts["tests/test_conformance.py"]
    assert "from hgms_my_own import MyOwn\n" in seen
    assert re.search(r"@parametrize_with_checks\(\[MyOwn\(\), MyOwn\(\w+=.*\)\]\)", seen)
    assert f"assert MyOwn in plugin.{registry.KINDS[kind].hook}()" in seen


def test_what_it_prints(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("my-own")
    assert done.exit_code == 0
    first, *rest = done.stdout.splitlines()
    assert first == "hgms-my-own: a plugin with the linear solver 'my-own'"
    assert {line.split()[0] for line in rest[: len(FILES)]} == FILES
    assert rest[len(FILES)] == "next:"
    assert [line.partition("#")[0].strip() for line in rest[len(FILES) + 1 :]] == [
        "cd hgms-my-own && pip install -e '.[test]'",
        "pytest",
        "hgms run run.toml",
    ]


def test_as_json(site: Site, tmp_path: Path) -> None:
    done = call("my-own", "--kind", "tasks", "--into", tmp_path / "a folder", "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["folder"] == str(tmp_path / "a folder" / "hgms-my-own")
    assert set(answer["files"]) == FILES
    assert answer["next"][0] == f"cd '{answer['folder']}' && pip install -e '.[test]'"
    assert "class MyOwn" in Path(answer["folder"], "src", "hgms_my_own.py").read_text()


PAIR = {
    *(FILES - {"run.toml", "src/hgms_my_own.py", "tests/test_hgms_my_own.py"}),
    *(f"run-{kind}.toml" for kind in ("generator", "solver")),
    *(f"src/hgms_my_two/{name}.py" for name in ("__init__", "generator", "solver")),
    *(f"tests/test_{kind}.py" for kind in ("generator", "solver")),
}


def test_several_components_in_one_distribution(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("my-two", "--kind", "generator, solvers", "--into", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first.endswith(
        "hgms-my-two: a plugin with the candidate generator and the linear solver 'my-two'"
    )
    assert [line.split("#")[0].strip() for line in rest[-2:]] == [
        "hgms run run-generator.toml",
        "hgms run run-solver.toml",
    ]
    texts = written(tmp_path / "hgms-my-two")
    assert set(texts) == PAIR
    for place, text in texts.items():
        assert not re.search(r"@\w+@|tmpl", text), place
        if place.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads(texts["pyproject.toml"])
    assert project["project"]["entry-points"] == {"hgms": {"my-two": "hgms_my_two"}}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == [
        "src/hgms_my_two"
    ]
    assert project["project"]["description"] in texts["README.md"]
    headings = re.findall(r"^#+ (.*)$", texts["README.md"], re.MULTILINE)
    parts = ["Source", "Equations", "Deviations"]
    assert headings == [
        "hgms-my-two",
        "The candidate generator",
        *parts,
        "The linear solver",
        *parts,
    ]
    for kind, cls in (("generator", "MyTwoGenerator"), ("solver", "MyTwoSolver")):
        assert re.search(rf"^class {cls}:$", texts[f"src/hgms_my_two/{kind}.py"], re.MULTILINE)
        assert "hgms_plugin_api" not in texts[f"src/hgms_my_two/{kind}.py"]
        assert f"from hgms_my_two import {cls}\n" in texts[f"tests/test_{kind}.py"]
        assert f"def test_{kind}(component, check):" in texts["tests/test_conformance.py"]
        assert f"- run: hgms check hgms_my_two:{cls}\n" in texts[".github/workflows/tests.yml"]
        assert f"hgms describe {kind} my-two" in texts["README.md"]
        assert f"hgms run run-{kind}.toml" in texts[f"run-{kind}.toml"]
    assert f"hgms_plugin_api = {PLUGIN_API}\n" in texts["src/hgms_my_two/__init__.py"]
    monkeypatch.syspath_prepend(tmp_path / "hgms-my-two" / "src")
    loaded = registry.Registry(plugins.Host.load(["hgms_my_two"]))
    assert {
        (item.kind.name, item.name)
        for item in loaded.components()
        if item.plugin.name == "hgms_my_two"
    } == {("generator", "my-two"), ("solver", "my-two")}


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [
        ("solver,generator,solvers", "'solver' twice"),
        (",", "no kind"),
        ("task,solvr", "did you mean 'solver'?"),
    ],
)
def test_kinds_that_are_refused(site: Site, tmp_path: Path, kinds: str, shown: str) -> None:
    done = call("my-own", "--kind", kinds, "--into", tmp_path / "new")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "(--kind)" in done.stderr
    assert shown in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "kind", "cls"), [("problem", "task", "ProblemTask"), ("none", "solver", "NoneSolver")]
)
def test_a_class_is_not_called_like_something_the_module_uses(
    site: Site, tmp_path: Path, name: str, kind: str, cls: str
) -> None:
    assert call(name, "--kind", kind, "--into", tmp_path).exit_code == 0
    file = tmp_path / f"hgms-{name}" / "src" / f"hgms_{name}.py"
    names = registry.Registry(plugins.Host.load([file])).get(kind, name)
    assert names.where.endswith(f":{cls}")


def test_the_two_instances_differ_from_each_other(kind: str, texts: dict[str, str]) -> None:
    """A second instance with the defaults' values would ask the same questions again."""
    (settings,) = re.findall(r"MyOwn\((\w+=[^)]*)\)", texts["tests/test_conformance.py"])
    for setting in settings.split(", "):
        name, _, value = setting.partition("=")
        field = re.search(
            rf"^    {name}: .*?default=([^,]+),", texts["src/hgms_my_own.py"], re.MULTILINE
        )
        assert field is not None, name
        assert field[1] != value, setting


def test_what_a_method_draws_by_its_name_is_good_enough_under_any(
    site: Site, tmp_path: Path
) -> None:
    """Its draws come from a key with its name: the settings of the test must not need luck."""
    settings = TESTED_WITH["method"]
    for number in range(8):
        name = f"walk-{number}"
        assert call(name, "--kind", "method", "--into", tmp_path).exit_code == 0
        file = tmp_path / f"hgms-{name}" / "src" / f"hgms_walk_{number}.py"
        cls: Any = registry.Registry(plugins.Host.load([file])).get("method", name).target
        check_optimum(eval(f"cls({settings})", {"cls": cls}))


BAD = [
    ("My_Solver", "solver", "NAME", "did you mean 'my-solver'?"),
    ("MySolver", "solver", "NAME", "did you mean 'my-solver'?"),
    ("2fast", "solver", "NAME", "did you mean 'fast'?"),
    ("42", "solver", "NAME", "'42'"),
    ("a/b", "solver", "NAME", "did you mean 'a-b'?"),
    ("", "solver", "NAME", "''"),
    ("hgms-mine", "solver", "NAME", "did you mean 'mine'?"),
    ("mine", "solvr", "--kind", "did you mean 'solver'?"),
    ("fast", "solver", "NAME", "the linear solver 'fast' of hgms-fake 3.0"),
    ("pipeline", "method", "NAME", "the method 'pipeline' of hgms "),
    ("fake", "task", "NAME", "the plugin 'fake' of hgms-fake 3.0"),
    ("big-cat", "task", "NAME", "the plugin 'Big_Cat' of hgms-fake 3.0"),
    ("core", "task", "NAME", "hgms_core"),
    ("bare", "task", "NAME", "hgms-bare 1.0"),
]


@pytest.mark.parametrize(("name", "kind", "place", "shown"), BAD)
def test_refused(site: Site, tmp_path: Path, name: str, kind: str, place: str, shown: str) -> None:
    site.solver("fake_plugin", "fast")
    site.install("hgms-fake", {"fake": "fake_plugin", "Big_Cat": "cat_plugin"}, version="3.0")
    site.solver("cat_plugin", "cat")
    site.install("hgms-bare", {})
    done = call(name, "--kind", kind, "--into", tmp_path / "new")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"({place})" in done.stderr
    assert shown in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_in_it_is_left_alone(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "hgms-mine"
    folder.mkdir()
    assert call("mine", "--into", tmp_path).exit_code == 0  # an empty one is as good as none
    before = written(folder)
    done = call("mine", "--kind", "task", "--into", tmp_path)
    assert done.exit_code == 2
    assert f".github, .gitignore, CHANGELOG.md, LICENSE, … ({folder})" in done.stderr
    assert written(folder) == before


def test_a_file_in_the_way(site: Site, tmp_path: Path) -> None:
    (tmp_path / "hgms-mine").write_text("mine")
    done = call("mine", "--into", tmp_path)
    assert (done.exit_code, (tmp_path / "hgms-mine").read_text()) == (2, "mine")
    assert f"({tmp_path / 'hgms-mine'})" in done.stderr
    done = call("mine", "--into", tmp_path / "hgms-mine")
    assert done.exit_code == 2
    assert f"{tmp_path / 'hgms-mine'} is a file (--into)" in done.stderr


@pytest.mark.parametrize(
    "text", ["already-good", "Weiß & Söhne", "ULA2Chain", "--x--", "snake_case_name"]
)
def test_the_nearest_spelling_is_right(text: str) -> None:
    assert registry.NAME.fullmatch(kebab(text))


def test_a_name_that_a_package_of_version_0_2_had_is_free(site: Site, tmp_path: Path) -> None:
    done = call("cg", "--kind", "task", "--into", tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert (tmp_path / "hgms-cg" / "src" / "hgms_cg.py").exists()
