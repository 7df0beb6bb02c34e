"""Leases on run folders: one process writes to a folder, and who is gone holds none."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.descent import files
from support.executor_grids import on_another_machine
from support.helpers import rejects
from support.processes import forked

from hgms.runs import RunFolder
from hgms.store import FolderInUse, HeldFolders, hold_lease, lease


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """A lease of three fifths of a second, here and in the marker of the other machine."""
    monkeypatch.setattr(lease, "SECONDS", 0.6)
    monkeypatch.setattr(lease, "GRACE", 0.3)
    monkeypatch.setattr(lease, "LOOK", 0.05)
    return 0.6


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_folder_is_held_by_one_process_and_free_once_that_is_gone(folder: Path) -> None:
    ends, begins = os.pipe()

    def hold() -> None:
        with hold_lease(folder):
            os.write(begins, b"held")
            time.sleep(600)

    process = forked(hold)
    try:
        assert os.read(ends, 4) == b"held"
        with rejects("folder-in-use", str(folder), of=FolderInUse) as caught, hold_lease(folder):
            pass
        assert f"process {process}" in str(caught.value)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    with hold_lease(folder) as held:  # at once: it is seen to be gone
        held.ensure()
    assert list(folder.iterdir()) == []


def test_a_clock_that_jumps_takes_no_run_from_a_holder_that_lives(
    folder: Path, short: float
) -> None:
    """It gives signs of life by a clock that is wrong by hours, and by another wrong one each
    time.
    """
    marker = on_another_machine(folder, short)
    stop = threading.Event()

    def live() -> None:
        for turn in itertools.count(1):
            if stop.wait(short / 3):
                break
            os.utime(marker, times=(time.time() + 6 * 3600.0 * turn * (-1) ** turn,) * 2)

    thread = threading.Thread(target=live)
    watch = HeldFolders()
    thread.start()
    try:
        with rejects("folder-in-use", str(folder), of=FolderInUse) as caught, hold_lease(folder):
            pass
        assert "process 1 on another-machine" in " ".join(caught.value.lines())
        until = time.monotonic() + 3 * short
        while time.monotonic() < until:  # as a coordinator looks after it
            assert not watch.free(folder)
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("jump", "swaps"), [(-6 * 3600.0, True), (6 * 3600.0, False)])
def test_a_clock_that_jumps_keeps_no_run_for_a_holder_that_is_gone(
    tmp_path: Path, short: float, jump: float, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who waits for it loses it, nor who looks after it now and then; it lasts as long as
    we have seen it unchanged, however old it is. NFS swaps no names.
    """
    if not swaps:
        monkeypatch.setattr("filelock._soft.exchange_names", lambda source, target: False)
    waited, watched = (tmp_path / name for name in ("waited", "watched"))
    for folder in (waited, watched):
        os.utime(on_another_machine(folder, short), times=(time.time() + jump,) * 2)
    began = time.monotonic()
    with pytest.raises(FolderInUse), hold_lease(waited, patience=0.1):
        pass
    with hold_lease(waited) as held:
        assert time.monotonic() - began >= short
        held.ensure()
    watch = HeldFolders()
    assert not watch.free(watched), "it was not looked after before"
    while not watch.free(watched):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    with hold_lease(watched, patience=0.0) as held:
        held.ensure()


@pytest.mark.parametrize("patience", [None, 60.0])
def test_a_marker_without_a_record_does_not_block_the_folder(
    folder: Path, patience: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed between creating its marker and writing its record leaves it
    empty.
    """
    monkeypatch.setattr(lease, "GRACE", 0.3)
    monkeypatch.setattr(lease, "LOOK", 0.05)
    folder.mkdir()
    (folder / ".lease").touch()
    began = time.monotonic()
    with rejects("folder-in-use", str(folder), of=FolderInUse), hold_lease(folder, patience=0.1):
        pass  # its process may still write the record
    with hold_lease(folder, patience=patience) as held:
        assert 0.3 <= time.monotonic() - began < 30.0
        held.ensure()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("record", ["", "filelock/2\npid=1\nhost=vm\n"])
def test_a_marker_of_a_process_that_was_killed_while_it_wrote_is_removed(
    folder: Path, record: str
) -> None:
    folder.mkdir()
    numbers = (2**31 - 1, 10**30, os.getpid())
    *ended, alive = (folder / f".lease.break.{number}.0af3" for number in numbers)
    for marker in (*ended, alive):
        marker.write_text(record)
    with hold_lease(folder):
        assert not any(marker.exists() for marker in ended)
    assert [*folder.iterdir()] == [alive]


def test_who_has_lost_its_lease_writes_nothing_more(folder: Path) -> None:
    kept = RunFolder(folder)
    with kept.claim("seed = 0"):
        kept.create("seed = 0", {})
        kept.append({"step": 0}, {"step": 0, "seconds": 0.0})
        taken = folder / ".taken"
        taken.write_text("filelock/2\n")
        taken.replace(folder / ".lease")  # as another machine does, after a minute of silence
        before = files(folder)
        for name, *arguments in (
            ("append", {"step": 1}, {"step": 1, "seconds": 0.0}),
            ("save", {}, 0),
            ("write_summary", {}),
            ("note", "a", 1),
            ("append_diagnosis", {}),
            ("create", "seed = 1", {}),
            ("rewind",),
        ):
            with rejects("folder-in-use", str(folder), of=FolderInUse):
                getattr(kept, name)(*arguments)
        assert files(folder) == before
    assert (folder / ".lease").exists(), "it is the other's"
