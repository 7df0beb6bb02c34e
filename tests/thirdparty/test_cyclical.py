"""The published distribution's own promises: an extra that may be missing, observers, a command.

What every example distribution has to do (build, install, be listed, run, pass its tests) is asked
by test_distributions.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from stranger import ROOT, Stranger

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("examples")]

EXAMPLE = ROOT / "docs" / "examples" / "hgms-cyclical"

# A program that believes matplotlib is not installed.
BARE = (
    "import sys; sys.modules['matplotlib'] = None; from hgms.cli import main; "
    "main(prog_name='hgms')"
)


@pytest.fixture(scope="module")
def run(stranger: Stranger) -> Path:
    """The folder of the run that its README names."""
    summary = json.loads(
        stranger.says("hgms", "run", str(EXAMPLE / "run.toml"), "--json", "--out", "cyclical")
    )
    assert summary["status"] == "done"
    return stranger.home / Path(summary["folder"])


def test_its_observer_and_its_command_tell_of_a_run(stranger: Stranger, run: Path) -> None:
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()[1:]]
    rows = [json.loads(line) for line in (run / "cycles.jsonl").read_text().splitlines()[1:]]
    assert [(row["step"], row["cycle"] - 1) for row in rows] == [
        (row["step"], row["selected"]) for row in steps
    ]
    picture = stranger.home / "cycles.svg"
    (answer,) = json.loads(
        stranger.says("hgms", "cycles", str(run.parent), "--json", "--plot", str(picture))
    )
    assert answer["shares"] == [
        sum(row["cycle"] == cycle for row in rows) / len(rows) for cycle in range(1, 5)
    ]
    assert "</svg>" in picture.read_text(encoding="utf-8")


def test_without_its_extra_only_the_picture_is_missing(stranger: Stranger, run: Path) -> None:
    finished = stranger.does("python", "-c", BARE, "cycles", str(run), "--plot", "missing.png")
    assert finished.returncode == 2
    assert "(--plot)" in finished.stderr
    assert finished.stderr.endswith("install it: pip install 'hgms-cyclical[plot]'\n")
    assert not (stranger.home / "missing.png").exists()
    assert "cycle 4" in stranger.says("python", "-c", BARE, "cycles", str(run))


def test_it_imports_public_modules_only() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (EXAMPLE / "src").rglob("*.py")]
    modules = set(re.findall(r"^(?:from|import) (hgms\S*)", "".join(texts), re.MULTILINE))
    foreign = {name for name in modules if not name.startswith("hgms_cyclical")}
    assert foreign <= {"hgms_core", "hgms.config", "hgms.cli", "hgms.report", "hgms.runs"}
