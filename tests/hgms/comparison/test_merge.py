"""`hgms merge`: what wins, what is an error, what is never read, and what a kill leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.helpers import rejects
from support.run_folders import contents

from hgms.cli import main
from hgms.comparison.grid_file import load
from hgms.comparison.merge import plan
from hgms.comparison.run_grid import run_grid
from hgms.plugins import Registry
from hgms.store import hold_lease
from hgms_core import ConfigError

pytestmark = pytest.mark.usefixtures("bowl")
PLUGIN = Path(__file__).parents[2] / "support" / "grid_plugin.py"
SWEEP = {"trials": 2, "seeds": [9], "space": {"walk": {"move.lr": [0.1, 0.2]}}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of seeds 0 to 2, and the sweep before them."""
    out = tmp_path_factory.mktemp("finished")
    table = {"budget": "5 steps", "seeds": 3, "task": "bowl", "method": "walk", "sweep": SWEEP}
    table["run"] = {"out": str(out), "checkpoint_seconds": 0.0}
    assert run_grid(load(table, registry=Registry.load([PLUGIN])), jobs=0).complete
    return out


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with the runs of such seeds."""

    def make(name: str, *seeds: int) -> Path:
        for number in seeds:
            path = seed(finished, number)
            shutil.copytree(path, tmp_path / name / path.relative_to(finished))
        return tmp_path / name

    return make


def unfinished(folder: Path, rows: int) -> None:
    """As a kill leaves it after so many rows."""
    (folder / "summary.json").unlink()
    for name in ("steps.jsonl", "timings.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join(lines[:rows]))


def seed(folder: Path, number: int) -> Path:
    [path] = folder.glob(f"bowl/*/seed-{number}")
    return path


def merge(*words: str | Path, code: int = 0) -> Any:
    done = CliRunner().invoke(main, ["merge", *map(str, words)])
    assert (done.exit_code, "Traceback" in done.output) == (code, False), done.output
    return done


@pytest.mark.extended
def test_runs_of_two_machines_are_one_folder(place: Callable[..., Path]) -> None:
    a, b = place("a", 0), place("b", 1, 2)
    before = contents(a, ""), contents(b, "")
    merge(a, b, "--dry-run")
    assert (contents(a, ""), contents(b, "")) == before, "nothing is done yet"
    assert merge(a, b).stdout == f"{a}: 2 copied\n"
    assert (contents(a, ""), contents(b, "")) == (contents(place("all", 0, 1, 2), ""), before[1])
    assert merge(a, b).stdout.endswith("2 kept\n")


@pytest.mark.parametrize("finished_one", ["target", "source", "neither"])
def test_the_finished_one_wins_else_the_one_that_has_come_further(
    place: Callable[..., Path], finished_one: str
) -> None:
    target, source = place("target", 0), place("source", 0)
    for folder, rows in ((target, 3), (source, 5)):
        if finished_one != folder.name:
            unfinished(seed(folder, 0), rows)
    expected = contents(target if finished_one == "target" else source, "")
    merge(target, source)
    assert contents(target, "") == expected


@pytest.mark.parametrize(
    ("file", "old", "new", "code"),
    [
        ("steps.jsonl", "upper_loss", "upper_less", "other-results"),
        ("config.toml", "noise = 0.05", "noise = 0.06", "other-settings"),
    ],
)
def test_two_results_of_one_run_are_an_error_that_names_both_places(
    place: Callable[..., Path], file: str, old: str, new: str, code: str
) -> None:
    a, b = place("a", 0, 1), place("b", 1, 2)
    changed = seed(b, 1) / file
    changed.write_text(changed.read_text().replace(old, new, 1))
    before = contents(a, "")
    shown = merge(a, b, code=2).stderr
    assert f"({seed(b, 1)})" in shown
    assert str(seed(a, 1)) in shown
    with rejects(code, str(seed(b, 1)), of=ConfigError):
        plan([a, b], a.parent / "joined")
    assert contents(a, "") == before


def test_leases_are_respected_but_do_not_travel_and_what_a_kill_left_is_in_nobodys_way(
    place: Callable[..., Path],
) -> None:
    """A process that was killed leaves its lease (of the run, of the mix around it, or a lock of
    0.7), and half of a merged folder.
    """
    a, b = place("a", 0), place("b", 0, 1)
    expected = contents(b, "")
    unfinished(seed(a, 0), 3)
    with hold_lease(seed(a, 0)):
        assert f"({seed(a, 0)})" in merge(a, b, code=2).stderr
    for name in (".lease", ".mix.lease", ".lease.break.17.0af3"):
        (seed(b, 0) / name).write_text("of a machine that nobody knows here")
    for left in (".merged-seed-0", ".merged-old-seed-1"):
        (seed(a, 0).with_name(left)).mkdir()
        (seed(a, 0).with_name(left) / "config.toml").write_text("half")
    merge(a, b)
    found = contents(a, "").items()
    assert {name: data for name, data in found if ".merged-old-" not in name} == expected


def test_sweeps_go_along(finished: Path, tmp_path: Path) -> None:
    merge(tmp_path / "a", finished)
    assert contents(tmp_path / "a", "") == contents(finished, "")


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "config.toml", "folder"])
@pytest.mark.parametrize("there", [True, False])
def test_links_and_pipes_are_not_merged(place: Callable[..., Path], kind: str, there: bool) -> None:
    a, target = place("a", 0), place("all", *([0] if there else []))
    file = seed(a, 0) / ("more" if kind == "folder" else "steps.jsonl")
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to(a.parent if kind == "folder" else kind)
    before = contents(target, "")
    assert str(file) in merge(target, a, code=2).output
    for source, into in ((a, target), *([(target, a)] if there and kind == "fifo" else [])):
        with rejects("not-a-file", str(file), of=ConfigError):
            plan([source], into)
    assert contents(target, "") == before
