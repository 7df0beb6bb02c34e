"""The project's frame: what is packaged, pinned and contracted is what is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hgms_core
from hgms_mix.stages.command import OTHERS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOPS = ("hgms", "hgms_mix")
PACKAGES = {
    ".".join(path.parent.relative_to(ROOT / "plugins").parts): path.parent
    for top in TOPS
    for path in sorted((ROOT / "plugins" / top).rglob("README.md"))
}
"""What is described on a page of its own."""
NO_HOOKS = {
    "hgms.config",
    "hgms.compiled",
    "hgms.diagnosis",
    "hgms.distributed",
    "hgms.gauss_newton",
    "hgms.integrations",
    "hgms.optim",
    "hgms.plugins",
    "hgms.results",
    "hgms.rows",
    "hgms.store",
    "hgms.tasks.images",
    "hgms.uncertainty",
}
"""Libraries: what others import, without a component or command of its own."""
WITH_METHOD = {"hgms.tuning"}
"""Programs that register a method, too: `hgms.tune` runs `auto`."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "plugins").with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_the_wheel_holds_the_core_and_every_package() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["hgms_core", "plugins"]
    assert wheel["sources"] == ["plugins"]
    assert {path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py")} == set(TOPS)
    assert not list((ROOT / "plugins").glob("*.py"))


def test_every_package_and_every_file_with_hooks_is_an_entry_point() -> None:
    entries = PROJECT["project"]["entry-points"]
    plugins, programs = ({*entries[name].values()} for name in ("hgms", "hgms.programs"))
    others = {module.rpartition(".")[0] for module in OTHERS.values()}
    described = set(PACKAGES) - (programs - WITH_METHOD) - others - NO_HOOKS
    assert {"hgms.solvers", "hgms.generators.branches", "hgms.tasks.cleaning"} <= described
    assert {name if name in PACKAGES else name.rpartition(".")[0] for name in plugins} == described
    assert plugins | programs == {
        module_of(path)
        for path in (ROOT / "plugins").rglob("*.py")
        if "\n@hookimpl" in path.read_text(encoding="utf-8") and "template" not in path.parts
    }


@pytest.mark.parametrize(
    ("folder", "tier"),
    [
        ("benchmarks", "extended"),
        ("gpu", "nightly"),
        ("peers", "nightly"),
        ("ranks", "extended"),
        ("thirdparty", "extended"),
    ],
)
def test_a_folder_of_one_tier_contains_no_other_test(folder: str, tier: str) -> None:
    """Where ``-m`` excludes the tier, the files are not imported (tests/conftest.py)."""
    mark = re.compile(rf"^pytestmark = (\[\s*)?pytest\.mark\.({tier}|nightly)\b", re.MULTILINE)
    alone = re.compile(rf"^def test_|^@pytest\.mark\.({tier}|nightly)\b.*\ndef test_", re.MULTILINE)
    for path in (ROOT / "tests" / folder).glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        assert mark.search(text) or all(found[1] for found in alone.finditer(text)), path.name


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == hgms_core.__version__
    version, _, unreleased = hgms_core.__version__.partition(".dev")
    heading = f"## {version} (unreleased)" if unreleased else f"## [{version}]"
    assert heading in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()


def names(requirements: list[str]) -> set[str]:
    """The projects that are required, in canonical spelling, without ourselves."""
    found = {re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0] for text in requirements}
    return {name.lower().replace("_", "-") for name in found} - {"hgms"}


def pinned(file: str) -> dict[str, str]:
    """The versions of a file of constraints."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


def test_every_dependency_is_pinned() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = {extra: names(extras[extra]) for extra in extras}
    there = names([*pinned("constraints.txt")])
    for extra in ("demo", "sklearn", "plot", "test", "docs", "lint"):
        assert names(project["dependencies"]) | wanted[extra] <= there
    assert wanted["peers"] <= there | names([*pinned("constraints-peers.txt")])
    assert pinned("constraints.txt")["torch"] == "2.13.0"


def test_the_lowest_versions_are_those_of_the_requirements() -> None:
    """The environment `tox -e oldest` installs exactly the lower bounds that are declared."""
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["sklearn"]]
    floors = dict(re.match(r"([^>=]+)[>=]+\s*([\d.]+)", text).groups() for text in wanted)
    lowest = pinned("constraints-lowest.txt")
    assert set(lowest) == set(floors)
    assert [name for name in floors if not f"{lowest[name]}.".startswith(f"{floors[name]}.")] == []


def test_no_lower_bound_is_below_the_version_that_has_what_is_used() -> None:
    """`torch.backends.mkldnn.matmul` is there since 2.9, `filelock.SoftFileLease` since 3.30."""
    bounds = dict(text.split(">=") for text in PROJECT["project"]["dependencies"] if ">=" in text)
    for name, since in (("torch", (2, 9)), ("filelock", (3, 30))):
        assert tuple(map(int, bounds[name].split(",")[0].split("."))) >= since, name


def test_every_package_has_types_for_others() -> None:
    folders = [ROOT / "hgms_core", *(ROOT / "plugins" / top for top in TOPS)]
    assert [folder.name for folder in folders if not (folder / "py.typed").is_file()] == []


def test_the_long_description_has_no_links_to_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.compile(r"\]\((?!https?:)[^)]*\)")
    assert links.search(text)
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert [part["path"] for part in hook["fragments"]] == ["README.md"]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert not links.search(text)


PARAMETERS = (8, 9)
FIELDS = (12, 3)
PUBLIC_NAMES = 60
"""Concepts, not lines, are capped: how many one may have, and how many functions or classes have
more. The second numbers and the last are ratchets: lower them when the code allows."""


def concepts(node: ast.AST) -> int:
    """The fields of a class, or the parameters of a function."""
    if isinstance(node, ast.ClassDef):
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        return sum("ClassVar" not in ast.unparse(child.annotation) for child in fields)
    arguments: ast.arguments = node.args  # type: ignore[attr-defined]
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


@pytest.mark.extended
def test_functions_have_few_parameters_and_classes_few_fields() -> None:
    definitions = [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node)
        for folder in ("hgms_core", "plugins")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for is_class, most, crowded in ((False, *PARAMETERS), (True, *FIELDS)):
        of_kind = [pair for pair in definitions if isinstance(pair[1], ast.ClassDef) is is_class]
        places = [place for place, node in of_kind if concepts(node) > most]
        assert len(places) <= crowded, places


def test_the_core_has_few_public_names() -> None:
    assert len(hgms_core.__all__) <= PUBLIC_NAMES


def test_importing_the_core_and_the_host_is_light() -> None:
    """No component, no command line, no plotting, no data library."""
    code = "import sys, hgms_core, hgms.plugins; print(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.partition(".")[0] for name in shown.stdout.split()}
    assert "torch" in loaded
    heavy = "transformers datasets pandas polars sklearn scipy matplotlib rich click cattrs"
    assert not loaded & {*heavy.split(), "hgms_mix", "tomlkit", "safetensors", "filelock"}
