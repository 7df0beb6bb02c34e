"""The example distribution, as a stranger would use it: built into a wheel, installed, listed, checked and run.

`tox -e thirdparty` does the same in an environment of its own, with our wheel in place of this working tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.plugins

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "hgms-example"
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
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def said(command: list[str], site: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_folder_holds_what_the_tutorial_names() -> None:
    ignored = {"__pycache__", ".pytest_cache"}
    files = {
        path.relative_to(EXAMPLE).as_posix() for path in EXAMPLE.rglob("*") if path.is_file() and not ignored & {*path.parts}
    }
    assert files == {"README.md", "pyproject.toml", "run.toml", "src/hgms_example.py", "tests/test_hgms_example.py"}


def test_the_wheel_holds_one_module_and_its_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        assert archive.read(entry_points).decode().split() == ["[hgms]", "example", "=", "hgms_example"]
    assert [name for name in names if ".dist-info/" not in name] == ["hgms_example.py"]


def test_it_is_listed(site: Path) -> None:
    rows = {row["name"]: row for row in json.loads(said([*HGMS, "list", "solver", "--json"], site))}
    assert rows["chebyshev"]["distribution"] == "hgms-example"
    assert rows["chebyshev"]["plugin"] == "example"
    assert rows["chebyshev"]["summary"].startswith("Chebyshev's iteration")


def test_it_runs_by_name(site: Path) -> None:
    command = [*HGMS, "run", str(EXAMPLE / "run.toml"), "--json", "--out", str(site.parent / "runs")]
    summary = json.loads(said(command, site))
    assert summary["status"] == "done"
    rows = [json.loads(line) for line in (Path(summary["folder"]) / "steps.jsonl").read_text().splitlines()[1:]]
    assert len(rows) == 20
    assert {row["outcome"] for row in rows} == {"converged"}


def test_its_own_tests_pass(site: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(EXAMPLE / "pyproject.toml")]
    shown = said([*command, str(EXAMPLE / "tests")], site)
    assert "passed" in shown.splitlines()[-1]
    assert "skipped" not in shown
