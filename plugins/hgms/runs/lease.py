"""Who may write to a folder that several processes, or several machines, share."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field
from filelock import SoftFileLease, Timeout

from hgms.runs import files
from hgms_core.errors import CheckpointError

LEASE = ".lease"
"""The file in a run's folder that says who has it. Other leases in it have names that end so."""
SECONDS = 60.0
"""How long a holder may give no sign of life before another machine takes its folder over. It gives
one three times as often. On the holder's own machine nobody waits: a process that is gone is seen
to be gone. All who share a folder must agree on it.
"""
GRACE = 5.0
"""Seconds more after which the marker is removed where it could not be swapped for another (NFS
refuses that).
"""


LOOK = 1.0
"""Seconds between two looks for a sign of life."""


def is_marker(name: str) -> bool:
    """Whether a file of this name in a run's folder says who has or had it, and nothing of the run.

    >>> is_marker(".lease"), is_marker(".mix.lease"), is_marker("steps.jsonl")
    (True, True, False)
    """
    return name.startswith(".") and name.endswith((LEASE, ".lock"))  # locks are those of 0.7


class FolderInUse(CheckpointError):
    """Another process writes to the folder."""


@define(eq=False)
class Lease:
    """A folder held by this process: a file ``.lease`` in it that says who holds it, and is touched
    every few seconds.

    It works where a lock of the operating system does not (NFS), and needs no clock that two
    machines share: who waits measures with its own how long the file stays as it is. A lease
    expires, so it cannot keep a process from writing that slept through its own; that one asks
    :meth:`ensure` before each write. Between question and write some microseconds are left.
    """

    path: Path
    _lease: SoftFileLease = field(init=False)
    _marker: tuple[int, int] = field(default=(0, 0), init=False)
    _seen: tuple[Any, float] = field(default=(None, 0.0), init=False)
    """The marker of another process, and since when it has been as it is, by our own clock that
    never jumps.
    """

    def __attrs_post_init__(self) -> None:
        # it, too, remembers what it saw
        self._lease = SoftFileLease(self.path, lease_duration=SECONDS)

    def acquire(self, patience: float | None) -> None:
        """FolderInUse where another process holds it and goes on holding it for ``patience``
        seconds; None: until it is seen to be alive, which takes no time on this machine and up to a
        third of ``SECONDS`` of another.

        Errors: CheckpointError if the marker is a pipe, a device or a folder.
        """
        if self.path.is_symlink():
            self.path.unlink()
        elif self.path.exists() and not self.path.is_file():
            raise CheckpointError(
                "not-a-file",
                "the path is not a regular file",
                place=(str(self.path),),
                hint="remove it",
            )
        self._look()
        pause = 0.0 if patience is None else patience
        while not self._taken(pause):
            alive = self._look() or self._is_here()
            if not alive and time.monotonic() - self._seen[1] > SECONDS + GRACE:
                self._lease.force_break()
            elif alive or patience is not None:
                who = holder(self.path.parent, self.path.name)
                raise FolderInUse(
                    "folder-in-use",
                    "another process is writing to the folder" + (f": {who}" if who else ""),
                    place=(str(self.path.parent),),
                    hint="wait until it ends, or use another folder",
                )
            pause = LOOK
        about = self.path.stat()
        self._marker = about.st_dev, about.st_ino

    def _taken(self, patience: float) -> bool:
        try:
            self._lease.acquire(timeout=patience)
        except Timeout:
            return False
        return True

    def _look(self) -> bool:
        """Whether somebody holds the folder, and has given a sign of life since the last look."""
        marker = None
        # opened: NFS then asks the server
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            about = os.fstat(stream.fileno())
            marker = about.st_ino, about.st_mtime_ns, about.st_ctime_ns
        before = self._seen[0]
        if marker != before:
            self._seen = marker, time.monotonic()
        return marker is not None and marker != before

    def _is_here(self) -> bool:
        """Whether the holder is a process of this machine that is there still."""
        owner = self._lease.owner
        if owner is None or owner.hostname != _host():
            return False
        if sys.platform == "win32":  # where signal 0 is none
            return True
        try:
            os.kill(owner.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def ensure(self) -> None:
        """FolderInUse where another process has taken the folder over."""
        # a process that looks at the marker may move it aside for a moment
        for pause in (0.05, 0.5, None):
            with contextlib.suppress(FileNotFoundError):
                about = os.lstat(self.path)
                if (about.st_dev, about.st_ino) == self._marker and self._lease.compromise is None:
                    return
                break
            if pause is not None:
                time.sleep(pause)
        raise FolderInUse(
            "folder-in-use",
            "another process has taken over the folder, because this process did not renew its "
            f"lease for {SECONDS:.0f} s",
            place=(str(self.path.parent),),
            hint="use the results of the other process; this one writes nothing more",
        )

    def release(self) -> None:
        self._lease.release()


@contextlib.contextmanager
def leased(folder: Path, name: str = LEASE, *, patience: float | None = None) -> Iterator[Lease]:
    """The folder, which is made if need be, for this process alone.

    Raises:
        FolderInUse: another process holds it, still after ``patience`` seconds (None: as soon as
            that is seen to be alive).
        DiskError: it cannot be written to.
    """
    lease = Lease(folder / name)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lease.acquire(patience)
    try:
        yield lease
    finally:
        lease.release()


def holder(folder: Path, *names: str) -> str:
    """Who holds the folder, in words; empty where nobody does. The first of the leases ``names``
    that somebody has counts.
    """
    paths = (folder / name for name in names or (LEASE,))
    owners = (SoftFileLease(path).owner for path in paths if path.is_file())
    owner = next((owner for owner in owners if owner is not None), None)
    if owner is None:
        return ""
    machine = owner.hostname.partition("?")[0]  # what follows is the kernel's number of a container
    return f"process {owner.pid}" + ("" if owner.hostname == _host() else f" on {machine}")


@define(eq=False)
class HeldFolders:
    """Folders that other processes hold: only who goes on looking at them sees that a holder on
    another machine gives no sign of life any more.
    """

    _leases: dict[Path, Lease] = field(factory=dict, init=False)

    def free(self, folder: Path, *names: str) -> bool:
        """Whether nobody holds ``names`` in the folder any more: then it may be claimed at once."""
        for name in names or (LEASE,):
            lease = self._leases.setdefault(folder / name, Lease(folder / name))
            try:
                if lease.path.exists():
                    lease.acquire(0.0)
                    lease.release()
            except FolderInUse:
                return False
            except (
                OSError,
                CheckpointError,
            ):  # a full disk, a folder that is gone: whoever claims it says so
                pass
            del self._leases[lease.path]
        return True


@functools.cache
def _host() -> str:
    """What leases call this machine."""
    with (
        tempfile.TemporaryDirectory(prefix="hgms-") as place,
        SoftFileLease(Path(place, "lease")) as lease,
    ):
        assert lease.owner is not None
        return lease.owner.hostname
