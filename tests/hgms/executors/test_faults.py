"""Faults of machines, with real processes: a disk that is full for one of two coordinators, a
machine that is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.executor_grids import PLUGIN, contents
from support.processes import Server, rows_written

CAPABILITIES = "+dac_override,+dac_read_search"
POOR = (
    "setpriv",
    "--reuid=65534",
    "--clear-groups",
    f"--inh-caps={CAPABILITIES}",
    f"--ambient-caps={CAPABILITIES}",
)
"""In front of a command: it may read and write what root may, but for what the disk keeps back
for root.
"""

GRID = """
budget = "12 steps"
seeds = 4
baselines = false
task = ["bowl"]

[run]
out = "runs"
checkpoint_seconds = 0.0
threads = 1

[[method]]
name = "walk"
pause = 0.01
"""
COMPARE = ("compare", "grid.toml", "--plugin", str(PLUGIN), "--jobs", "0")


def start(folder: Path, *arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A coordinator in a process of its own, with ``before`` in front of its command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*before, sys.executable, "-P", "-m", "hgms.cli", *COMPARE, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def reaches(folder: Path, rows: int, *processes: subprocess.Popen[str]) -> None:
    """Waits until the runs have so many rows, as long as the processes live."""
    until = time.monotonic() + 300
    while rows_written(folder) < rows:
        assert time.monotonic() < until
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB that keeps half of it back for root: for others it is full while root
    writes on.
    """
    tools = [name for name in ("mkfs.ext4", "setpriv", "mount") if shutil.which(name) is None]
    if sys.platform != "linux" or os.geteuid() != 0 or tools:
        pytest.skip(
            f"it takes root on Linux to mount a small disk{' and ' * bool(tools)}{', '.join(tools)}"
        )
    image = tmp_path / "image"
    place = tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as stream:
        stream.truncate(8 << 20)
    subprocess.run(
        ["mkfs.ext4", "-q", "-b", "1024", "-m", "50", str(image)], check=True, capture_output=True
    )
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a file is not allowed here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.extended
def test_a_disk_that_is_full_for_one_of_two_coordinators(
    small_disk: Path, tmp_path: Path, server: Server
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "grid.toml").write_text(GRID)
    alone = server.run(whole, *COMPARE)
    assert alone.returncode == 0, alone.stderr
    (small_disk / "grid.toml").write_text(GRID)
    for name in ("hold-0-6", "hold-1-6"):
        (small_disk / name).touch()
    poor = start(small_disk, before=POOR)
    reaches(small_disk, 7, poor)
    rich = start(small_disk, "--json")
    reaches(small_disk, 7 + 7, poor, rich)
    filling = [*POOR, "dd", "if=/dev/zero", f"of={small_disk / 'filling'}", "bs=1k"]
    full = subprocess.run(filling, capture_output=True, text=True, check=False)
    assert "No space left on device" in full.stderr
    (small_disk / "hold-0-6").unlink()
    out, err = poor.communicate(timeout=300)
    assert poor.returncode == 1, (out, err)
    [error] = [line for line in err.splitlines() if "error" in line]
    assert "disk is full" in error
    assert "(runs)" in error
    assert "Traceback" not in err
    assert out == ""
    (small_disk / "hold-1-6").unlink()
    out, err = rich.communicate(timeout=300)
    assert rich.returncode == 0, err
    assert json.loads(out)["failed"] == []
    assert contents(small_disk / "runs") == contents(whole / "runs")
    counted = {
        path.parent.name: json.loads(path.read_text())
        for path in small_disk.rglob("resources.json")
    }
    twice = [seed for seed, row in counted.items() if row["processor_seconds"] is None]
    assert (len(counted), twice) == (4, ["seed-0"]), (
        "what was broken off was begun twice, nothing else"
    )
