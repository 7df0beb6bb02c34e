"""A plugin of every kind from ``hgms new plugin``: built, installed, listed, checked, run, and put
to its own tests.

Starting an interpreter with torch takes seconds, so plugins of all kinds share one site, one run of
pytest and one process of commands.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from stranger import build

from hgms.cli import main
from hgms.plugins import KINDS

pytestmark = pytest.mark.extended

COMMANDS = """
import importlib, json, sys
from click.testing import CliRunner
from hgms.cli import main
from hgms.testing import imports
for line in sys.argv[1:]:
    if line.startswith("check|"):
        module = importlib.import_module(line.partition("|")[2].partition(":")[0])
        imports.announce(module.__name__)  # all are imported in one watched interpreter
told = {}
for line in sys.argv[1:]:
    done = CliRunner().invoke(main, line.split("|"))
    told[line] = (done.exit_code, done.stdout, done.stderr)
print(json.dumps(told))
"""


PROJECTS = {f"made-{kind}": kind for kind in KINDS}
MADE = [
    (name, f"hgms_made_{kind}:Made{kind.capitalize()}", "run.toml")
    for name, kind in PROJECTS.items()
]
"""(the distribution, a class of it, and its configuration)."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one distribution per kind as the command writes them."""
    folder = tmp_path_factory.mktemp("new")
    for name, kind in PROJECTS.items():
        words = ["new", "plugin", name, "--kind", kind, "--into", str(folder)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def site(place: Path) -> Path:
    """A folder on the path with their unpacked wheels: installed, as far as importlib.metadata
    can tell.
    """
    wheels = build(place / "wheels", [place / f"hgms-{name}" for name in PROJECTS])
    assert len(wheels) == len(KINDS)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place / "site")
    return place / "site"


def python(*words: str, cwd: Path, site: Path) -> str:
    """What Python says with the plugins on its path."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, **how)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def listing(site: Path, place: Path) -> dict[str, tuple[int, str, str]]:
    """What ``hgms plugins``, ``hgms check`` and ``hgms run`` say, with all of them installed."""
    lines = ["plugins|--json"]
    for name, cls, config in MADE:
        file = place / f"hgms-{name}" / config
        lines += [f"check|{cls}"]
        lines += [f"run|{file}|--json|--out|{place / 'runs'}|--set|budget='3 steps'"]
    told: dict[str, tuple[int, str, str]] = json.loads(
        python("-c", COMMANDS, *lines, cwd=place, site=site)
    )
    return told


def answer(listing: dict[str, tuple[int, str, str]], start: str) -> str:
    ((code, out, err),) = [value for line, value in listing.items() if line.startswith(start)]
    assert code == 0, out + err
    return out


@pytest.mark.parametrize(("name", "cls", "config"), MADE)
def test_it_is_installed_listed_checked_and_run(
    listing: dict[str, tuple[int, str, str]],
    site: Path,
    place: Path,
    name: str,
    cls: str,
    config: str,
) -> None:
    module = cls.partition(":")[0]
    points = (site / f"{module}-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert points.split() == ["[hgms]", name, "=", module]
    rows: list[dict[str, Any]] = json.loads(answer(listing, "plugins"))
    (row,) = [row for row in rows if row["name"] == name]
    told = [row[key] for key in ("status", "distribution", "version", "error")]
    assert told == ["loaded", f"hgms-{name}", "0.1.0", None]
    assert row["hooks"] == [KINDS[PROJECTS[name]].hook]
    shown = answer(listing, f"check|{cls}")
    assert re.search(rf"^{cls}: [^$]*\n\d\d passed(, \d+ skipped)?\n$", shown), shown
    summary = json.loads(answer(listing, f"run|{place / f'hgms-{name}' / config}"))
    assert (summary["status"], summary["outer_steps"]) == ("done", 3)
    assert f'"{name}"' in (Path(summary["folder"]) / "config.toml").read_text()


@pytest.mark.nightly
def test_their_own_tests_pass(site: Path, place: Path) -> None:
    """Those of all kinds in one process; each test is known by its component's name."""
    folders = [f"hgms-{name}/{part}" for name in PROJECTS for part in ("tests", "src")]
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--import-mode=importlib"]
    options += ["-c", "hgms-made-solver/pyproject.toml"]
    shown = python("-m", "pytest", *options, *folders, cwd=place, site=site)
    # torch warns of itself
    (count,) = re.findall(r"^(\d+) passed(?:, \d+ warnings?)? in [\d.]+s", shown.splitlines()[-1])
    assert int(count) > 300
    for kind in KINDS:
        assert re.search(rf"PASSED \S*test_conformance\[made-{kind}\([^)]*\)-repeatable\]", shown)
