"""Faults of machines, with real processes: a disk that is full for one of two coordinators, a
machine that is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.executor_grids import GRID, PLUGIN, begun_twice, contents
from support.processes import Server, reaches, started

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

COMPARE = ("compare", "grid.toml", "--plugin", str(PLUGIN), "--jobs", "0")


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
    poor = started(small_disk, *COMPARE, before=POOR)
    reaches(small_disk, 7, poor)
    rich = started(small_disk, *COMPARE, "--json")
    reaches(small_disk, 7 + 7, poor, rich)
    filling = [*POOR, "dd", "if=/dev/zero", f"of={small_disk / 'filling'}", "bs=1k"]
    full = subprocess.run(filling, capture_output=True, text=True, check=False)
    assert "No space left on device" in full.stderr
    (small_disk / "hold-0-6").unlink()
    out, err = poor.communicate(timeout=300)
    assert poor.returncode == 1, (out, err)
    [error] = [line for line in err.splitlines() if "error" in line]
    assert all(part in error for part in ("disk is full", "(runs)"))
    assert ("Traceback" in err, out) == (False, "")
    (small_disk / "hold-1-6").unlink()
    out, err = rich.communicate(timeout=300)
    assert rich.returncode == 0, err
    assert json.loads(out)["failed"] == []
    assert contents(small_disk / "runs") == contents(whole / "runs")
    assert begun_twice(small_disk) == ["seed-0"], "what was broken off, nothing else"
