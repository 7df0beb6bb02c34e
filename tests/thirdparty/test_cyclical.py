"""The published distribution with an extra, observers and a command, as a stranger would use it: from its wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.plugins

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hgms-cyclical"
HGMS = [sys.executable, "-m", "hgms_core.cli"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=EXAMPLE, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the path with the unpacked wheel: installed, as far as importlib.metadata can tell."""
    folder = tmp_path_factory.mktemp("site") / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def done(command: list[str], *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=path[-1].parent, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def said(command: list[str], *path: Path) -> str:
    finished = done(command, *path)
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    assert "warning" not in finished.stderr, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def run(site: Path) -> Path:
    """The folder of the run that its README names."""
    command = [*HGMS, "run", str(EXAMPLE / "run.toml"), "--json", "--out", str(site.parent / "runs")]
    summary = json.loads(said(command, site))
    assert summary["status"] == "done"
    return site.parent / Path(summary["folder"])


def test_the_wheel_holds_the_package_its_entry_point_and_its_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        read = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    package = {name.removeprefix("hgms_cyclical/") for name in names if ".dist-info/" not in name}
    assert package == {"__init__.py", "command.py", "langevin.py", "observer.py", "picture.py", "py.typed"}
    assert read["entry_points.txt"].split() == ["[hgms]", "cyclical", "=", "hgms_cyclical"]
    told = Parser().parsestr(read["METADATA"])
    assert told.get_all("Provides-Extra") == ["plot", "test"]
    needs = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needs == ["hgms<0.2,>=0.1"], "matplotlib is an extra"


def test_it_is_listed_and_whole(site: Path) -> None:
    rows = {row["name"]: row for row in json.loads(said([*HGMS, "plugins", "--json"], site))}
    mine = rows["cyclical"]
    assert (mine["distribution"], mine["version"], mine["status"]) == ("hgms-cyclical", "0.1.0", "loaded")
    assert {"hgms_register_generators", "hgms_register_commands", "hgms_step_finished"} <= set(mine["hooks"])
    rows = {row["name"]: row for row in json.loads(said([*HGMS, "list", "generator", "--json"], site))}
    assert rows["cyclical-langevin"]["distribution"] == "hgms-cyclical"


def test_its_observer_and_its_command_tell_of_a_run(site: Path, run: Path) -> None:
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()[1:]]
    rows = [json.loads(line) for line in (run / "cycles.jsonl").read_text().splitlines()[1:]]
    assert [(row["step"], row["cycle"] - 1) for row in rows] == [(row["step"], row["selected"]) for row in steps]
    (told,) = json.loads(said([*HGMS, "cycles", str(run.parent), "--json"], site))
    assert told["shares"] == [sum(row["cycle"] == cycle for row in rows) / len(rows) for cycle in range(1, 5)]


def test_without_its_extra_only_the_picture_is_missing(site: Path, run: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')\n")
    finished = done([*HGMS, "cycles", str(run), "--plot", str(tmp_path / "x.png")], absent, site)
    assert finished.returncode == 2
    assert "pip install 'hgms-cyclical[plot]'" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "cycle 4" in said([*HGMS, "cycles", str(run)], absent, site)


def test_it_uses_public_names_only() -> None:
    for path in (EXAMPLE / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        modules = {line.split()[1] for line in text.splitlines() if line.startswith(("from hgms", "import hgms"))}
        assert {name for name in modules if not name.startswith("hgms_cyclical")} <= {"hgms_core", "hgms_core.running"}, path


def test_its_own_tests_pass(site: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(EXAMPLE / "pyproject.toml")]
    shown = said([*command, str(EXAMPLE / "tests"), "--pyargs", "hgms_cyclical"], site)  # with the docstrings' examples
    assert "passed" in shown.splitlines()[-1]
    assert "skipped" not in shown
