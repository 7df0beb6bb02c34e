"""Folders with a manifest: which files count, what is rejected, and what a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.descent import files
from support.helpers import rejects
from support.processes import forked

from hgms.store import DiskError, FileRecord, Folder, FolderInUse, digest, read_manifest
from hgms.store import files as stored_files
from hgms.store.folder import with_checksum
from hgms_core.errors import CheckpointError

FACTS = {"step": 2, "state": {"list": [1, None, 0.5]}}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder with a file and a log."""
    folder = Folder(tmp_path / "mine", "key")
    with folder.lease():
        folder.write("weights", b"0.5")
        folder.append({"log": b"one\n"})
        folder.append({"log": b"two\n"})
        folder.commit(["weights", "log"], facts=FACTS, done=True)
    return folder


def again(folder: Folder, key: str = "key") -> Folder:
    """The same folder in another process."""
    return Folder(folder.path, key)


def test_the_manifest_records_key_status_facts_and_files(folder: Folder) -> None:
    manifest = again(folder).manifest()
    assert (manifest.key, manifest.status, manifest.facts) == ("key", "done", FACTS)
    assert manifest.files == {
        "weights": FileRecord(3, digest(b"0.5")),
        "log": FileRecord(8, digest(b"one\ntwo\n")),
    }
    assert again(folder).read("weights") == folder.verified_path("weights").read_bytes() == b"0.5"
    assert not (folder.path / ".lease").exists()
    assert read_manifest(folder.path) == manifest
    assert read_manifest(folder.path.parent) is None


def test_a_new_folder_has_no_record_and_no_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new", "key")
    assert folder.manifest().status == "new"
    assert not folder.is_done()
    assert folder.read_log("log") == b""
    assert not folder.path.exists()


def test_a_file_counts_once_it_is_committed(folder: Folder) -> None:
    other = again(folder)
    with other.lease():
        other.write("part/more", b"new")
        other.write("weights", b"0.7")
    assert "part/more" not in folder.manifest().files
    with rejects("damaged-file", str(folder.path / "weights"), of=CheckpointError):
        folder.read("weights")
    with other.lease():
        other.commit(["part/more"], facts={})
        other.remove_unrecorded("*")
    assert other.read("part/more") == b"new"
    assert sorted(path.name for path in folder.path.iterdir()) == ["manifest.json", "part"]


def test_pieces_are_written_in_order_and_their_digest_is_not_read_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [np.arange(size).data for size in (3, 5)]
    folder.write("array", pieces)
    monkeypatch.setattr("hgms.store.folder.file_digest", Mock(side_effect=AssertionError))
    folder.commit(["array"], facts={})
    assert folder.read("array") == b"".join(map(bytes, pieces))


def test_files_of_other_programs_are_recorded_from_the_disk(folder: Folder) -> None:
    (folder.path / "model").mkdir()
    (folder.path / "model" / "config").write_bytes(b"{}")
    folder.commit(["model/config"], facts={}, done=True)
    assert folder.is_done()
    assert folder.read("model/config") == b"{}"
    (folder.path / "link").symlink_to(folder.path / "model" / "config")
    with rejects("not-a-file", str(folder.path / "link"), of=CheckpointError):
        folder.commit(["link"], facts={})


def test_records_that_are_kept_are_not_read_again(folder: Folder) -> None:
    other = again(folder)
    before = other.manifest().files["log"]
    other.append({"log": b"three\n"})
    other.write("summary", b"{}")
    other.commit(["summary"], facts=other.manifest().facts, keep=["log", "gone"])
    assert other.manifest().files["log"] == before
    assert other.read_log("log") == b"one\ntwo\nthree\n"
    assert list(other.manifest().files) == ["log", "summary"]


# --- logs


def test_a_log_is_cut_back_to_its_record(folder: Folder) -> None:
    other = again(folder)
    with other.lease():
        other.append({"log": b"three\nfo", "later": b"x"})
    assert not folder.is_done(), "a finished artifact has exactly its files"
    with rejects("damaged-file", str(folder.path / "log"), of=CheckpointError):
        folder.read_log("log")
    with other.lease():
        other.rewind("log")
        other.rewind("later")
        assert (folder.path / "log").read_bytes() == b"one\ntwo\n"
        assert (folder.path / "later").read_bytes() == b""
        other.append({"log": b"3\n"})
        other.commit(["log"], facts={})
        other.append({"log": b"4\n"})
    assert other.manifest().files["log"] == FileRecord(10, digest(b"one\ntwo\n3\n"))
    assert other.read_log("log") == b"one\ntwo\n3\n4\n"
    assert (folder.path / "later").read_bytes() == b""


def test_a_log_may_be_larger_than_the_limit_of_files(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "ROWS", 2000)
    monkeypatch.setattr("hgms.store.folder.PIECE", 999)
    folder.write("large", b"1" * 3000)
    folder.commit(["large"], facts={})
    stored_files.append(folder.path / "large", b"2" * 3000)
    again(folder).rewind("large")
    assert (folder.path / "large").read_bytes() == b"1" * 3000


def test_a_log_that_was_changed_is_rejected_and_stays(folder: Folder) -> None:
    path = folder.path / "log"
    for damaged in (b"one\ntwO\n", b"one\n", b""):
        path.write_bytes(damaged)
        with rejects("damaged-file", str(path), of=CheckpointError):
            again(folder).rewind("log")
        assert path.read_bytes() == damaged
    path.unlink()
    path.symlink_to(folder.path / "weights")
    with rejects("not-a-file", str(path), of=CheckpointError):
        again(folder).rewind("log")
    (folder.path / "other").symlink_to(folder.path / "weights")
    with rejects("not-a-file", str(folder.path / "other"), of=CheckpointError):
        again(folder).rewind("other")


def test_a_commit_reads_no_log_and_flushes_only_what_has_grown(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder.lease():
        folder.append({"log": b"3\n", "other": b"x"})
        monkeypatch.setattr(stored_files, "open_file", Mock(side_effect=AssertionError))
        synced = []
        sync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))
        )
        folder.commit(["log", "other"], facts={})
        folder.append({"log": b"4\n"})
        folder.commit(["log", "other"], facts={})
        monkeypatch.undo()
    steps = [Path(path).name for path in synced]
    around = ["mine", "manifest.json.part", "mine"]
    assert steps == ["log", "other", *around, "log", *around]


# --- what is rejected


def test_other_settings_are_rejected(folder: Folder) -> None:
    before = files(folder.path)
    other = again(folder, "other")
    for use in (other.manifest, other.is_done, lambda: other.lease().__enter__()):
        with rejects("other-settings", str(folder.path / "manifest.json"), of=CheckpointError):
            use()
    assert files(folder.path) == before, "the lease was given back"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 3')),
            "damaged-file",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged-file"),
        (lambda path: path.write_bytes(b"[" * 9999), "damaged-file"),
        (lambda path: path.write_bytes(b"{}"), "damaged-file"),
        *(
            (lambda path, table=table: path.write_bytes(with_checksum(table)), "damaged-file")
            for table in (
                {},
                {"key": "key", "status": "done", "facts": {}},
                {"key": "key", "status": "odd", "facts": {}, "files": {}},
                {"key": "key", "status": "done", "facts": {}, "files": {"log": {"bytes": 1}}},
                *(
                    {
                        "key": "key",
                        "status": "done",
                        "facts": {},
                        "files": {name: {"bytes": 1, "sha256": ""}},
                    }
                    for name in ("../log", "/log", "")
                ),
            )
        ),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not-a-file"),
        (lambda path: (path.rename(path.with_name("m")), path.symlink_to("m")), "not-a-file"),
    ],
)
def test_a_damaged_manifest_is_rejected(
    folder: Folder, change: Callable[[Path], object], code: str
) -> None:
    path = folder.path / "manifest.json"
    change(path)
    with rejects(code, str(path)):
        folder.is_done()


def test_changed_files_are_rejected_and_missing_files_make_it_unfinished(folder: Folder) -> None:
    path = folder.path / "weights"
    path.write_bytes(b"0.7")
    for use in (
        folder.is_done,
        lambda: folder.read("weights"),
        lambda: folder.verified_path("weights"),
    ):
        with rejects("damaged-file", str(path), of=CheckpointError):
            use()
    path.write_bytes(b"0.50")
    assert not folder.is_done()
    with rejects("damaged-file", str(path), of=CheckpointError):
        folder.read("weights")
    path.unlink()
    assert not folder.is_done()
    with rejects("unreadable-file", str(path), of=CheckpointError):
        folder.read("weights")
    with rejects("damaged-file", str(folder.path / "manifest.json"), of=CheckpointError):
        folder.read("unknown")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_are_neither_followed_nor_opened(
    folder: Folder, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"one\ntwo\n")
    for name in ("log", "weights"):
        path = folder.path / name
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(target)
    assert not folder.is_done()
    for use in (folder.read, folder.rewind, again(folder).rewind):
        with rejects("not-a-file", str(folder.path / "log"), of=CheckpointError):
            use("log")
    with pytest.raises(CheckpointError):
        again(folder).append({"log": b"three\n"})
    folder.write("weights", b"1")
    assert target.read_bytes() == b"one\ntwo\n"


# --- leases, and what a kill leaves


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_one_process_writes_to_a_folder(folder: Folder) -> None:
    ends, begins = os.pipe()

    def hold() -> None:
        with folder.lease():
            os.write(begins, b"held")
            time.sleep(600)

    process = forked(hold)
    try:
        assert os.read(ends, 4) == b"held"
        with rejects("folder-in-use", str(folder.path), of=FolderInUse), again(folder).lease():
            pass
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    with again(folder).lease():
        pass


def test_a_process_that_has_lost_its_lease_writes_nothing(folder: Folder) -> None:
    with folder.lease():
        marker = folder.path / ".lease"
        marker.rename(folder.path / "moved")
        marker.write_bytes((folder.path / "moved").read_bytes())
        (folder.path / "moved").unlink()
        before = files(folder.path)
        for use in (
            lambda: folder.write("weights", b"1"),
            lambda: folder.append({"log": b"x"}),
            lambda: folder.rewind("log"),
            lambda: folder.commit([], facts={}),
            lambda: folder.remove_unrecorded("*"),
        ):
            with rejects("folder-in-use", str(folder.path), of=FolderInUse):
                use()
        assert files(folder.path) == before


def test_a_full_disk_keeps_the_last_commit(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(folder.path)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with rejects("cannot-write", str(folder.path / "weights"), of=DiskError):
        folder.write("weights", b"1")
    with rejects("cannot-write", of=DiskError):
        folder.commit(["weights"], facts={})
    monkeypatch.undo()
    assert files(folder.path) == before
    assert again(folder).is_done()


def test_markers_that_killed_processes_left_aside_are_removed(folder: Folder) -> None:
    def record(process: int, host: str) -> str:
        return (
            f"filelock/2\npid={process}\nhost={host}\nmode=lease\ntoken={'0' * 32}\nduration=60\n"
        )

    with folder.lease():
        here = (folder.path / ".lease").read_text().split("host=")[1].split("\n")[0]
    process = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(process, 0)
    asides = {
        "gone": record(process, here),
        "alive": record(os.getpid(), here),
        "elsewhere": record(process, "another-machine"),
        "unreadable": json.dumps({}),
    }
    for name, text in asides.items():
        (folder.path / f".lease.break.{process}.{name}").write_text(text)
    with folder.lease():
        left = {path.name.split(".")[-1] for path in folder.path.glob(".lease.break.*")}
    assert left == {"alive", "elsewhere"}
