"""The example distributions, as a stranger uses them: built into wheels, installed, listed,
checked, run, compared, tested.
"""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stranger import PROJECTS, ROOT, Stranger, metadata, plugin_of

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("examples")]

GRIDS = [project / "grid.toml" for project in PROJECTS if (project / "grid.toml").exists()]

WHERE = """
import importlib, importlib.metadata, json, sys
from packaging.requirements import Requirement
told = {}
for distribution, module in zip(sys.argv[1::2], sys.argv[2::2]):
    found = importlib.metadata.distribution(distribution)
    needs = [Requirement(line) for line in found.requires or []]
    unmet = [str(need) for need in needs
             if not need.marker and importlib.metadata.version(need.name) not in need.specifier]
    where = importlib.import_module(module).__file__
    told[distribution] = [where, str(found.locate_file("")), unmet]
print(json.dumps(told))
"""

TOGETHER = """
budget = "2 steps"
seeds = 1
baselines = false
[run]
out = "together"
[[task]]
name = "feature-penalties"
dataset = "wine"
[[method]]
name = "hg-ms"
[[method]]
name = "hg-ms"
label = "all-three"
generator = { name = "cyclical-langevin", count = 2, cycle_steps = 10 }
[method.hypergradient]
solver = { name = "chebyshev", low = 0.01, high = 40.0, rtol = 1e-3, max_steps = 10 }
"""


COMMANDS = """
import json, sys
from click.testing import CliRunner
from hgms.cli import main
told = {}
for line in sys.argv[1:]:
    done = CliRunner().invoke(main, line.split("|"))
    told[line] = [done.exit_code, done.stdout, done.stderr]
print(json.dumps(told))
"""

Told = Callable[..., str]


def checks_of(project: Path) -> list[str]:
    """The classes that its README has checked."""
    return re.findall(
        r"^ +hgms check (\S+)", (project / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def run_of(project: Path) -> list[str]:
    return ["run", str(project / "run.toml"), "--json", "--out", "runs"]


@pytest.fixture(scope="module")
def listing(stranger: Stranger) -> Told:
    """What commands say, all given in one process: starting one with torch takes longer than
    most of them.
    """
    (stranger.home / "together.toml").write_text(TOGETHER)
    lines = [["list", "--json"], ["compare", "together.toml", "--jobs", "0", "--json"]]
    lines += [["compare", str(grid), "--dry-run"] for grid in GRIDS]
    lines += [["check", target] for project in PROJECTS for target in checks_of(project)]
    lines += [run_of(project) for project in PROJECTS]
    ended = json.loads(stranger.says("python", "-c", COMMANDS, *map("|".join, lines)))

    def answer(*command: str) -> str:
        code, out, err = ended["|".join(command)]
        assert code == 0, f"hgms {' '.join(command)}\n{out}\n{err}"
        return str(out)

    return answer


@pytest.fixture(scope="module")
def plugins(stranger: Stranger) -> dict[str, dict[str, Any]]:
    """What `hgms plugins` says of each."""
    return {row["name"]: row for row in json.loads(stranger.says("hgms", "plugins", "--json"))}


def test_they_are_found() -> None:
    assert {project.name for project in PROJECTS} >= {"hgms-example", "hgms-feature-penalties"}


def test_the_wheels_are_what_is_used_and_have_what_they_need(stranger: Stranger) -> None:
    pairs = {metadata(project)["name"]: plugin_of(project)[1] for project in PROJECTS} | {
        "hgms": "hgms_core"
    }
    listing = json.loads(
        stranger.says("python", "-c", WHERE, *[word for pair in pairs.items() for word in pair])
    )
    for distribution, (file, place, unmet) in listing.items():
        assert Path(file).is_relative_to(stranger.site), distribution
        assert Path(place) == stranger.site, distribution
        assert unmet == [], distribution


def test_the_wheel_holds_its_package_and_entry_point_only(
    project: Path, stranger: Stranger
) -> None:
    name, module = plugin_of(project)
    with zipfile.ZipFile(stranger.wheel(project)) as archive:
        names = archive.namelist()
        (entry_points,) = [wheel for wheel in names if wheel.endswith("entry_points.txt")]
        assert archive.read(entry_points).decode().split() == ["[hgms]", name, "=", module]
    source = project / "src"
    ours = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert {wheel for wheel in names if ".dist-info/" not in wheel} == ours


def test_the_folder_of_the_first_example_holds_what_the_tutorial_names() -> None:
    example = ROOT / "docs" / "examples" / "hgms-example"
    ignored = {"__pycache__", ".pytest_cache"}
    files = {
        path.relative_to(example)
        for path in example.rglob("*")
        if path.is_file() and not ignored & {*path.parts}
    }
    named = {
        "README.md",
        "pyproject.toml",
        "run.toml",
        "src/hgms_example.py",
        "tests/test_hgms_example.py",
    }
    assert {path.as_posix() for path in files} == named


def test_it_is_loaded(project: Path, plugins: dict[str, dict[str, Any]]) -> None:
    own = metadata(project)
    name, module = plugin_of(project)
    row = plugins[name]
    assert (row["module"], row["distribution"], row["version"]) == (
        module,
        own["name"],
        own["version"],
    )
    assert (row["status"], row["error"]) == ("loaded", None)
    # a busy machine may take a second to import it; anything else is a fault
    assert [note for note in row["notes"] if "its import took" not in note] == []


def test_its_components_are_listed(project: Path, listing: Told) -> None:
    rows = [
        row
        for row in json.loads(listing("list", "--json"))
        if row["distribution"] == metadata(project)["name"]
    ]
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert rows
    for row in rows:
        assert (row["plugin"], row["status"]) == (plugin_of(project)[0], "available")
        assert row["summary"]
        assert f"`{row['name']}`" in readme, "its README names every component"
    if project.name == "hgms-example":
        assert [row["name"] for row in rows] == ["chebyshev"]
        assert rows[0]["summary"].startswith("Chebyshev's iteration")


def test_it_passes_the_checks_that_its_readme_names(project: Path, listing: Told) -> None:
    assert checks_of(project)
    for target in checks_of(project):
        assert re.search(r"^\d+ passed(, \d+ not asked)?$", listing("check", target), re.MULTILINE)


def test_it_runs_by_name(project: Path, stranger: Stranger, listing: Told) -> None:
    summary = json.loads(listing(*run_of(project)))
    assert summary["status"] == "done"
    rows = [
        json.loads(line)
        for line in (stranger.home / summary["folder"] / "steps.jsonl").read_text().splitlines()[1:]
    ]
    assert len(rows) == summary["outer_steps"] > 0
    if project.name == "hgms-example":
        assert len(rows) == 20
        assert {row["outcome"] for row in rows} == {"converged"}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda path: path.parent.name)
def test_its_grid_can_be_run(grid: Path, listing: Told) -> None:
    table = tomllib.loads(grid.read_text(encoding="utf-8"))
    cells = len(table["task"]) * len(table["method"]) * table["seeds"]
    assert listing("compare", str(grid), "--dry-run").count(" new ") >= cells


def test_they_work_together(listing: Told) -> None:
    (compared,) = json.loads(listing("compare", "together.toml", "--jobs", "0", "--json"))["tasks"]
    rows = {row["method"]: row for row in compared["methods"]}
    assert (compared["metric"], set(rows)) == ("test_loss", {"hg-ms", "all-three"})
    for row in rows.values():
        assert (row["failed"], row["outer_steps"]["mean"]) == (0, 2)
        assert row["metrics"]["noise_auc"]["mean"] > 0.5
    # two cycles of 10 steps instead of two branches of 60: it is the other distributions' parts
    # that ran
    spent = {name: row["oracle_calls"]["mean"] for name, row in rows.items()}
    assert spent["all-three"] < 0.5 * spent["hg-ms"]


def test_its_own_tests_pass(project: Path, stranger: Stranger) -> None:
    flags = ["-q", "-p", "no:cacheprovider", "-c", str(project / "pyproject.toml")]
    # by the installed package's name, too, for the examples in its docstrings
    where = [str(project / "tests"), "--pyargs", plugin_of(project)[1]]
    shown = stranger.says("python", "-m", "pytest", *flags, *where)
    assert "passed" in shown.splitlines()[-1]
    assert "skipped" not in shown
