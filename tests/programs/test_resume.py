"""A run killed with SIGKILL at random moments, resumed each time, equals the run that was left
alone, bit for bit.
"""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
from processes import Server, rows_written, strike

from hgms.runs import RunConfig, RunFolder, run_config
from hgms_core import CheckpointError

pytestmark = pytest.mark.plugins

CONFIG = """
seed = 3

[task]
name = "hyper-cleaning"
dataset = "digits"
corruption = 0.5

[method]
name = "{method}"
generator.count = {count}
generator.steps = 5

[budget]
outer_steps = 32

[run]
threads = 1
evaluate_every = 3
checkpoint_seconds = 0.0
"""


def prepared(folder: Path, method: str, count: int) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(method=method, count=count))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    [path] = folder.glob("runs/*/*/*")
    kept = [
        file
        for file in path.iterdir()
        if file.name.startswith(("checkpoint", "steps", "summary", "config"))
    ]
    assert len(kept) == 5, sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in kept}


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.extended)])
def test_killed_and_resumed_equals_left_alone(tmp_path: Path, server: Server, kills: int) -> None:
    whole, killed = (prepared(tmp_path / name, "hg-ms", 3) for name in ("whole", "killed"))
    assert server.run(whole, "run", "config.toml").returncode == 0

    chance = random.Random(0)
    for kill in range(kills):
        # The run must move on, or all kills would be kills of the same step; then a random moment
        # more.
        rows = rows_written(killed) + chance.randint(1, 20 // kills)
        process = server.start(killed, "run", "config.toml", "--resume")
        strike(process, killed, rows, signal.SIGKILL, chance.uniform(0, 0.03))
        assert server.end() == -signal.SIGKILL, f"the run ended before kill {kill + 1}"
    assert server.run(killed, "run", "config.toml", "--resume").returncode == 0
    assert contents(whole) == contents(killed)


def test_ctrl_c_says_how_to_resume(tmp_path: Path, server: Server) -> None:
    folder = prepared(tmp_path / "run", "hg-implicit", 1)
    process = server.start(folder, "run", "config.toml")
    strike(process, folder, 3, signal.SIGINT)
    assert server.end() == 130
    errors = (folder / "err").read_text()
    assert "--resume" in errors
    assert "Traceback" not in errors


def test_a_run_that_0_2_0_began_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the released version, killed in its fourth step: its rows stay, the others are
    those of a whole run.
    """
    monkeypatch.chdir(tmp_path)
    before = Path(__file__).parent / "run-0.2.0"
    config = RunConfig.from_toml((before / "config.toml").read_text())
    folder = RunFolder(shutil.copytree(before, config.path))
    assert folder.path == Path("runs/quadratic/soba-196735da/seed-3"), "where it is looked for"

    resumed = run_config(config, resume=True)
    whole = run_config(config, path=tmp_path / "whole")
    assert resumed.info.resumed_from == 3
    assert (
        folder.steps.read_bytes().split(b"\n")[:4]
        == (before / "steps.jsonl").read_bytes().split(b"\n")[:4]
    )
    for row, expected in zip(resumed.records, whole.records, strict=True):
        assert row.keys() == expected.keys()
        for key in row.keys() - {"seconds"}:
            number = isinstance(row[key], float)
            assert row[key] == (
                pytest.approx(expected[key], rel=1e-9) if number else expected[key]
            ), key
    again = run_config(config, resume=True)  # now with seals, which are compared
    assert (again.summary, again.records) == (resumed.summary, resumed.records)


@pytest.mark.parametrize("name", ["steps.jsonl", "timings.jsonl"])
def test_a_run_that_0_2_0_began_is_refused_where_a_row_is_missing(
    tmp_path: Path, name: str
) -> None:
    folder = RunFolder(shutil.copytree(Path(__file__).parent / "run-0.2.0", tmp_path / "run"))
    rows = (folder.path / name).read_bytes().split(b"\n")
    (folder.path / name).write_bytes(b"\n".join([*rows[:2], *rows[3:]]))
    with pytest.raises(CheckpointError, match=rf"damaged run file .*{name}: it lacks step 2"):
        folder.load()
