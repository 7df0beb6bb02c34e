"""`hgms merge`: what wins, what is an error, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison.from_python import compare
from hgms.comparison.merge import plan
from hgms.runs import leased
from hgms_core import ConfigError

pytestmark = pytest.mark.usefixtures("bowl")


def run(out: Path, seeds: list[int], steps: int = 6) -> None:
    assert compare(
        "bowl", "walk", f"{steps} steps", seeds, out, run={"checkpoint_seconds": 0.0}, jobs=0
    ).complete


def unfinished(folder: Path, rows: int) -> None:
    """As a kill leaves it after so many rows."""
    (folder / "summary.json").unlink()
    for name in ("steps.jsonl", "timings.jsonl"):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(b"".join(lines[:rows]))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def seed(folder: Path, number: int) -> Path:
    [path] = folder.glob(f"bowl/*/seed-{number}")
    return path


@pytest.fixture
def hgms() -> Callable[..., Any]:
    return lambda *words: CliRunner().invoke(main, ["merge", *map(str, words)])


def test_runs_of_two_machines_are_one_folder(tmp_path: Path, hgms: Callable[..., Any]) -> None:
    run(tmp_path / "all", [0, 1, 2, 3])
    run(tmp_path / "a", [0, 1])
    run(tmp_path / "b", [2, 3])
    before = contents(tmp_path / "b")
    listed = hgms(tmp_path / "a", tmp_path / "b", "--dry-run", "--json")
    assert [row["what"] for row in json.loads(listed.stdout)] == ["copy", "copy"]
    assert not list((tmp_path / "a").glob("bowl/*/seed-2")), "nothing is done yet"
    done = hgms(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'a'}: 2 copied\n")
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "all").keys()
    assert contents(tmp_path / "b") == before
    assert hgms(tmp_path / "a", tmp_path / "b").stdout.endswith("2 kept\n")
    assert compare(
        "bowl",
        "walk",
        "6 steps",
        [0, 1, 2, 3],
        tmp_path / "a",
        run={"checkpoint_seconds": 0.0},
        jobs=0,
    ).complete


@pytest.mark.parametrize("finished", ["target", "source", "neither"])
def test_the_finished_one_wins_else_the_one_that_has_come_further(
    tmp_path: Path, hgms: Callable[..., Any], finished: str
) -> None:
    run(tmp_path / "whole", [0])
    for name, rows in (("target", 3), ("source", 5)):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        if finished != name:
            unfinished(seed(tmp_path / name, 0), rows)
    source = contents(tmp_path / "source")
    target = contents(tmp_path / "target")
    done = hgms(tmp_path / "target", tmp_path / "source")
    assert done.exit_code == 0, done.stderr
    assert contents(tmp_path / "target") == (target if finished == "target" else source)


def test_a_run_with_two_results_is_an_error_that_names_both_places(
    tmp_path: Path, hgms: Callable[..., Any]
) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, [0, 1])
    steps = seed(tmp_path / "b", 1) / "steps.jsonl"
    steps.write_bytes(steps.read_bytes().replace(b"upper_loss", b"upper_less", 1))
    run(tmp_path / "b", [2])
    before = contents(tmp_path / "a")
    done = hgms(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 2
    assert f"({seed(tmp_path / 'b', 1)})" in done.stderr
    assert str(seed(tmp_path / "a", 1)) in done.stderr
    with rejects("other-results", str(seed(tmp_path / "b", 1)), of=ConfigError):
        plan([tmp_path / "b"], tmp_path / "a")
    assert contents(tmp_path / "a") == before


def test_two_sources_that_differ_are_an_error_too(tmp_path: Path, hgms: Callable[..., Any]) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, [0])
    config = seed(tmp_path / "b", 0) / "config.toml"
    config.write_text(config.read_text().replace("noise = 0.05", "noise = 0.06"))
    done = hgms(tmp_path / "joined", tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 2
    assert f"({seed(tmp_path / 'b', 0)})" in done.stderr
    with rejects("other-settings", str(seed(tmp_path / "b", 0)), of=ConfigError):
        plan([tmp_path / "a", tmp_path / "b"], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_a_run_under_way_is_left_alone(tmp_path: Path, hgms: Callable[..., Any]) -> None:
    run(tmp_path / "a", [0])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    unfinished(seed(tmp_path / "a", 0), 3)
    with leased(seed(tmp_path / "a", 0)):
        done = hgms(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 2
    assert f"({seed(tmp_path / 'a', 0)})" in done.stderr
    assert hgms(tmp_path / "a", tmp_path / "b").exit_code == 0
    assert (seed(tmp_path / "a", 0) / "summary.json").exists()


def test_who_had_a_folder_does_not_travel(tmp_path: Path, hgms: Callable[..., Any]) -> None:
    """A process that was killed leaves its lease: of the run, of the mix around it, or a lock of
    0.7.
    """
    run(tmp_path / "b", [0])
    for name in (".lease", ".mix.lease", ".mix.lock"):
        (seed(tmp_path / "b", 0) / name).write_text("of a machine that nobody knows here")
    assert hgms(tmp_path / "a", tmp_path / "b").exit_code == 0
    copied = tmp_path / "a" / seed(tmp_path / "b", 0).relative_to(tmp_path / "b")
    assert (copied / "summary.json").exists()
    assert not [path.name for path in copied.iterdir() if path.name.endswith((".lease", ".lock"))]


@pytest.mark.parametrize("left", [".merged-seed-0", ".merged-old-seed-0"])
def test_what_a_kill_left_is_in_nobodys_way(
    tmp_path: Path, hgms: Callable[..., Any], left: str
) -> None:
    run(tmp_path / "b", [0])
    place = tmp_path / "a" / seed(tmp_path / "b", 0).relative_to(tmp_path / "b")
    (place.parent / left).mkdir(parents=True)
    (place.parent / left / "config.toml").write_text("half")
    done = hgms(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 0, done.stderr
    assert contents(place) == contents(seed(tmp_path / "b", 0))


def test_sweeps_go_along(tmp_path: Path, hgms: Callable[..., Any]) -> None:
    sweep = {"trials": 2, "seeds": [9], "space": {"walk": {"move.lr": [0.1, 0.2]}}}
    assert compare("bowl", "walk", "3 steps", [0], tmp_path / "b", sweep=sweep, jobs=0).complete
    assert hgms(tmp_path / "a", tmp_path / "b").exit_code == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    table = tmp_path / "a" / "sweeps" / "bowl" / "walk" / "sweep.json"
    table.write_text(table.read_text().replace('"seed": 0', '"seed": 1'))
    done = hgms(tmp_path / "a", tmp_path / "b")
    assert done.exit_code == 2
    assert f"({tmp_path / 'b' / 'sweeps' / 'bowl' / 'walk' / 'sweep.json'})" in done.stderr
    assert str(table) in done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("a", "nowhere"), "missing-file"),
        (("b", "b"), "wrong-value"),
        (("b", "b/bowl"), "wrong-value"),
    ],
)
def test_bad_folders_are_named(
    tmp_path: Path,
    hgms: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, str],
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b/bowl").mkdir(parents=True)
    done = hgms(*words)
    assert done.exit_code == 2
    assert f"({words[1]})" in done.stderr
    assert "Traceback" not in done.stderr
    with rejects(code, words[1]):
        plan([Path(words[1])], Path(words[0]))


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "folder-link"])
@pytest.mark.parametrize("there", [True, False])
def test_links_and_pipes_are_not_merged(
    tmp_path: Path, hgms: Callable[..., Any], kind: str, there: bool
) -> None:
    run(tmp_path / "a", [0])
    if there:
        shutil.copytree(tmp_path / "a", tmp_path / "all")
    file = seed(tmp_path / "a", 0) / ("steps.jsonl" if kind != "folder-link" else "more")
    file.unlink(missing_ok=True)
    secret = tmp_path / "secret"
    secret.mkdir()
    if kind == "fifo":
        os.mkfifo(file)
    else:
        targets = {"device": Path("/dev/zero"), "link": seed(tmp_path / "a", 0) / "config.toml"}
        file.symlink_to(targets.get(kind, secret))
    before = contents(tmp_path / "all")
    with rejects("not-a-file", str(file), of=ConfigError):
        plan([tmp_path / "a"], tmp_path / "all")
    done = hgms(tmp_path / "all", tmp_path / "a")
    assert done.exit_code == 2
    assert str(file) in done.output
    assert contents(tmp_path / "all") == before


def test_a_pipe_in_the_target_is_not_read(tmp_path: Path) -> None:
    run(tmp_path / "a", [0])
    shutil.copytree(tmp_path / "a", tmp_path / "all")
    file = seed(tmp_path / "all", 0) / "steps.jsonl"
    file.unlink()
    os.mkfifo(file)
    with rejects("not-a-file", str(file), of=ConfigError):
        plan([tmp_path / "a"], tmp_path / "all")
