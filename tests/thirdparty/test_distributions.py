"""The example distributions, as a stranger uses them: built into wheels, installed, listed,
checked, run, compared, tested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from stranger import PROJECTS, Stranger, metadata, plugin_of

pytestmark = pytest.mark.extended


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
    lines = [["list", "--json"], ["plugins", "--json"]]
    lines += [["check", target] for project in PROJECTS for target in checks_of(project)]
    lines += [run_of(project) for project in PROJECTS]
    ended = json.loads(stranger.says("python", "-c", COMMANDS, *map("|".join, lines)))

    def answer(*command: str) -> str:
        code, out, err = ended["|".join(command)]
        assert code == 0, f"hgms {' '.join(command)}\n{out}\n{err}"
        return str(out)

    return answer


def test_the_wheels_are_what_is_used_and_have_what_they_need(stranger: Stranger) -> None:
    modules = {metadata(project)["name"]: plugin_of(project)[1] for project in PROJECTS}
    assert {"hgms-example", "hgms-feature-penalties"} <= set(modules)
    words = [word for pair in (*modules.items(), ("hgms", "hgms_core")) for word in pair]
    for name, found in json.loads(stranger.says("python", "-c", WHERE, *words)).items():
        file, *rest = found
        assert Path(file).is_relative_to(stranger.site), name
        assert rest == [str(stranger.site), []], name


def test_it_is_loaded_listed_checked_and_run(
    project: Path, stranger: Stranger, listing: Told
) -> None:
    own = metadata(project)
    name, module = plugin_of(project)
    (row,) = [row for row in json.loads(listing("plugins", "--json")) if row["name"] == name]
    assert (row["module"], row["distribution"]) == (module, own["name"])
    assert (row["version"], row["status"], row["error"]) == (own["version"], "loaded", None)
    assert row["notes"] == []
    listed = json.loads(listing("list", "--json"))
    rows = [row for row in listed if row["distribution"] == own["name"]]
    assert {(row["plugin"], row["status"], bool(row["summary"])) for row in rows} == {
        (name, "available", True)
    }
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert [row["name"] for row in rows if f"`{row['name']}`" not in readme] == []
    assert checks_of(project)
    for target in checks_of(project):
        assert re.search(r"^\d+ passed(, \d+ skipped)?$", listing("check", target), re.MULTILINE)
    summary = json.loads(listing(*run_of(project)))
    steps = (stranger.home / summary["folder"] / "steps.jsonl").read_text().splitlines()[1:]
    assert (summary["status"], len(steps)) == ("done", summary["outer_steps"])


@pytest.mark.nightly
def test_its_own_tests_pass(project: Path, stranger: Stranger) -> None:
    flags = ["-q", "-p", "no:cacheprovider", "-c", str(project / "pyproject.toml")]
    # by the installed package's name, too, for the examples in its docstrings
    where = [str(project / "tests"), "--pyargs", plugin_of(project)[1]]
    shown = stranger.says("python", "-m", "pytest", *flags, *where)
    assert "passed" in shown.splitlines()[-1]
    assert "skipped" not in shown
