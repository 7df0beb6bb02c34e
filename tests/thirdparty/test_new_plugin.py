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

from hgms.cli import main
from hgms_core.registry import KINDS

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("new-plugin")]

ROOT = Path(__file__).resolve().parents[2]

BUILD = """
import os, sys
from hatchling.builders.wheel import WheelBuilder
for project in sys.argv[2:]:
    os.chdir(project)
    list(WheelBuilder(project).build(directory=sys.argv[1], versions=["standard"]))
"""

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


def name_of(kind: str) -> str:
    return f"made-{kind}"


def class_of(kind: str) -> str:
    return f"hgms_made_{kind}:Made{kind.capitalize()}"


PAIR = "made-pair"
PAIRED = ("generator", "selector", "solver")
"""A distribution with several components."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with eight distributions as the command writes them."""
    folder = tmp_path_factory.mktemp("new")
    for name, kinds in (*((name_of(kind), kind) for kind in KINDS), (PAIR, ",".join(PAIRED))):
        words = ["new", "plugin", name, "--kind", kinds, "--into", str(folder)]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def site(place: Path) -> Path:
    """A folder on the path with their unpacked wheels: installed, as far as importlib.metadata
    can tell.
    """
    projects = [str(place / f"hgms-{name}") for name in (*map(name_of, KINDS), PAIR)]
    shell([sys.executable, "-c", BUILD, str(place / "wheels"), *projects], place)
    wheels = sorted((place / "wheels").glob("*.whl"))
    assert len(wheels) == len(KINDS) + 1
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place / "site")
    return place / "site"


def shell(command: list[str], cwd: Path, site: Path | None = None) -> str:
    environment = {
        **os.environ,
        **({"PYTHONPATH": str(site)} if site else {}),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def listing(site: Path, place: Path) -> dict[str, tuple[int, str, str]]:
    """What ``hgms plugins``, ``hgms check`` and ``hgms run`` say, with all of them installed."""
    lines = ["plugins|--json"]
    for name, _, cls, config in MADE:
        file = place / f"hgms-{name}" / config
        lines += [f"check|{cls}"]
        lines += [f"run|{file}|--json|--out|{place / 'runs'}|--set|budget='3 steps'"]
    failed: dict[str, tuple[int, str, str]] = json.loads(
        shell([sys.executable, "-c", COMMANDS, *lines], place, site)
    )
    return failed


def answer(listing: dict[str, tuple[int, str, str]], start: str) -> str:
    ((code, out, err),) = [value for line, value in listing.items() if line.startswith(start)]
    assert code == 0, out + err
    return out


MADE = [
    *((name_of(kind), (kind,), class_of(kind), "run.toml") for kind in KINDS),
    *((PAIR, PAIRED, f"hgms_made_pair:MadePair{k.capitalize()}", f"run-{k}.toml") for k in PAIRED),
]


@pytest.mark.parametrize(("name", "kinds", "cls", "config"), MADE)
def test_it_is_installed_listed_checked_and_run(
    listing: dict[str, tuple[int, str, str]],
    site: Path,
    place: Path,
    name: str,
    kinds: tuple[str, ...],
    cls: str,
    config: str,
) -> None:
    module = cls.partition(":")[0]
    points = (site / f"{module}-0.1.0.dist-info" / "entry_points.txt").read_text()
    assert points.split() == ["[hgms]", name, "=", module]
    rows: list[dict[str, Any]] = json.loads(answer(listing, "plugins"))
    (row,) = [row for row in rows if row["name"] == name]
    assert (row["status"], row["distribution"], row["version"]) == (
        "loaded",
        f"hgms-{name}",
        "0.1.0",
    )
    assert (set(row["hooks"]), row["error"]) == ({KINDS[kind].hook for kind in kinds}, None)
    shown = answer(listing, f"check|{cls}")
    assert shown.startswith(f"{cls}: ")
    assert re.search(r"\n\d\d passed(, \d+ not asked)?\n$", shown), shown
    summary = json.loads(answer(listing, f"run|{place / f'hgms-{name}' / config}"))
    assert (summary["status"], summary["outer_steps"]) == ("done", 3)
    assert f'"{name}"' in (Path(summary["folder"]) / "config.toml").read_text()


@pytest.mark.nightly
def test_their_own_tests_pass(site: Path, place: Path) -> None:
    """Those of all kinds in one process; each test is known by its component's name."""
    folders = [
        f"hgms-{name}/{part}" for name in (*map(name_of, KINDS), PAIR) for part in ("tests", "src")
    ]
    options = [
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-c",
        "hgms-made-solver/pyproject.toml",
    ]
    shown = shell([sys.executable, "-m", "pytest", *options, *folders], place, site)
    # torch warns of itself
    (count,) = re.findall(r"^(\d+) passed(?:, \d+ warnings?)? in [\d.]+s", shown.splitlines()[-1])
    assert int(count) > 300
    for kind in KINDS:
        checks = set(
            re.findall(rf"PASSED \S*test_conformance\[{name_of(kind)}\([^)]*\)-([\w-]+)\]", shown)
        )
        assert {"registration", "docstring", "import", "repeatable"} < checks
        assert f"test_hgms_made_{kind}.py::" in shown
        assert f"hgms_made_{kind}.Made{kind.capitalize()}" in shown  # the docstring's example
    for kind in PAIRED:
        assert re.search(rf"PASSED \S*test_{kind}\[{PAIR}\([^)]*\)-repeatable\]", shown)
        assert f"hgms_made_pair.{kind}.MadePair{kind.capitalize()}" in shown


def test_our_wheel_holds_the_templates(tmp_path: Path) -> None:
    shell([sys.executable, "-c", BUILD, str(tmp_path), str(ROOT)], tmp_path)
    (wheel,) = tmp_path.glob("hgms-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("hgms/cli/new/template/")}
    programs = ROOT / "plugins"
    here = {
        path.relative_to(programs).as_posix()
        for path in (programs / "hgms/cli/new" / "template").rglob("*")
        if path.is_file()
    }
    assert packed == here
    assert len(here) == 8 + 4 * len(KINDS)
