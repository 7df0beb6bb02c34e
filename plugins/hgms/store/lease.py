"""Write access to a folder that several processes or machines share."""

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
from filelock import OwnerRecord, SoftFileLease, Timeout

from hgms.store import files
from hgms_core.errors import CheckpointError

LEASE = ".lease"
"""The file in a run's folder that identifies its holder.

The names of other leases in the folder end with the same text.
"""
SECONDS = 60.0
"""Seconds without renewal after which another machine takes over a folder.

The holder renews its lease three times as often. Processes on the holder's machine do not wait,
because they can detect that the holder has ended. All processes that share a folder must use the
same value.
"""
GRACE = 5.0
"""Additional seconds before a marker is removed that could not be replaced.

NFS does not support the replacement. A marker without a record is removed after this time alone.
"""
LOOK = 1.0
"""Seconds between two checks whether the holder has renewed its lease."""


def is_marker(name: str) -> bool:
    """Return whether a file name in a run's folder belongs to a lease.

    Such a file identifies the current or a former holder. It contains no data of the run.

    Examples
    --------
    >>> is_marker(".lease"), is_marker(".mix.lease"), is_marker("steps.jsonl")
    (True, True, False)
    >>> is_marker(".lease.break.17.0af3")
    True
    """
    return name.startswith(".") and (name.endswith(LEASE) or f"{LEASE}.break." in name)


class FolderInUse(CheckpointError):
    """Another process is writing to the folder."""


@define(eq=False)
class Lease:
    """A lease of a folder for this process.

    A file ``.lease`` in the folder identifies the holder. The holder touches it every few seconds.

    A lease also works on NFS, where locks of the operating system do not work. It does not need
    synchronised clocks: a waiting process measures with its local clock how long the file stays
    unchanged.

    A lease expires. A process that was suspended for longer than its lease could still write. It
    therefore calls :meth:`ensure` before each write. Some microseconds remain between this check
    and the write.
    """

    path: Path
    _lease: SoftFileLease = field(init=False)
    _marker: tuple[int, int] = field(default=(0, 0), init=False)
    _seen: tuple[Any, float] = field(default=(None, 0.0), init=False)
    """The marker of another process, and the time since which it is unchanged.

    The time is from the monotonic clock of this process.
    """

    def __attrs_post_init__(self) -> None:
        # SoftFileLease also stores the markers that it has seen
        self._lease = SoftFileLease(self.path, lease_duration=SECONDS)

    def acquire(self, patience: float | None) -> None:
        """Acquire the lease, or raise FolderInUse if another process keeps it.

        ``patience`` is the number of seconds to wait for the other process. With ``None``, the wait
        ends when the other process is known to be alive. This check takes no time on this machine,
        and up to a third of ``SECONDS`` for another machine.

        Raises
        ------
        CheckpointError
            If the marker is a pipe, a device or a folder.
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
        until = time.monotonic() + (patience or 0.0)
        pause = 0.0
        while not self._try_acquire(pause):
            alive = self._look() or self._is_here()
            if not alive and self._is_abandoned():
                self._lease.force_break()
            elif alive if patience is None else time.monotonic() >= until:
                who = holder(self.path.parent, self.path.name)
                raise FolderInUse(
                    "folder-in-use",
                    "another process is writing to the folder" + (f": {who}" if who else ""),
                    place=(str(self.path.parent),),
                    hint="wait until it ends, or use another folder",
                )
            pause = LOOK if patience is None else min(LOOK, max(0.0, until - time.monotonic()))
        about = self.path.stat()
        self._marker = about.st_dev, about.st_ino
        self._remove_remains()

    def _remove_remains(self) -> None:
        """Remove the markers that processes of this machine left aside when they were killed.

        A process that checks a marker moves it aside for a moment. A marker whose process is alive
        is therefore kept. The record is incomplete if the process was killed while it wrote; the
        name of the file then has its number.
        """
        for aside in self.path.parent.glob(f"{self.path.name}.break.*"):
            owner = SoftFileLease(aside).owner
            number = aside.name.removeprefix(f"{self.path.name}.break.").partition(".")[0]
            is_incomplete = owner is None and number.isdecimal() and not _is_running(int(number))
            if is_incomplete or is_gone(owner):
                aside.unlink(missing_ok=True)

    def _try_acquire(self, patience: float) -> bool:
        try:
            self._lease.acquire(timeout=patience)
        except Timeout:
            return False
        return True

    def _look(self) -> bool:
        """Return whether another process has renewed the lease since the last check."""
        marker = None
        # opening the file makes NFS request its state from the server
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            about = os.fstat(stream.fileno())
            marker = about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_size
        before = self._seen[0]
        if marker != before:
            self._seen = marker, time.monotonic()
        return marker is not None and marker != before

    def _is_abandoned(self) -> bool:
        """Return whether the marker has been unchanged for so long that it can be removed.

        A process writes its record right after it creates the marker. A marker that stays empty
        remains from a process that was killed in between, and ``filelock`` never removes it.
        """
        marker, since = self._seen
        is_empty = marker is not None and marker[-1] == 0
        return time.monotonic() - since > (GRACE if is_empty else SECONDS + GRACE)

    def _is_here(self) -> bool:
        """Return whether the holder is a running process of this machine."""
        owner = self._lease.owner
        return owner is not None and owner.hostname == _host() and not is_gone(owner)

    def ensure(self) -> None:
        """Raise FolderInUse if another process has taken over the folder."""
        # a process that checks the marker may move it for a moment
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
def hold_lease(
    folder: Path, name: str = LEASE, *, patience: float | None = None
) -> Iterator[Lease]:
    """Acquire a folder for this process inside the context, and create it if necessary.

    Raises
    ------
    FolderInUse
        Another process keeps the folder for more than ``patience`` seconds. With ``None``, the
        error is raised as soon as that process is known to be alive.
    DiskError
        The folder is not writable.
    """
    lease = Lease(folder / name)
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lease.acquire(patience)
    try:
        yield lease
    finally:
        lease.release()


def holder(folder: Path, name: str = LEASE) -> str:
    """Return a text for the process that holds this lease of the folder, or an empty text."""
    path = folder / name
    owner = SoftFileLease(path).owner if path.is_file() else None
    if owner is None:
        return ""
    machine = owner.hostname.partition("?")[0]  # the rest is the kernel's id of a container
    return f"process {owner.pid}" + ("" if owner.hostname == _host() else f" on {machine}")


def is_gone(owner: OwnerRecord | None) -> bool:
    """Return whether a process is known to have ended, because it was on this machine."""
    return owner is not None and owner.hostname == _host() and not _is_running(owner.pid)


def _is_running(number: int) -> bool:
    """Return whether this machine may have a process with the number."""
    if sys.platform == "win32":
        return True  # signal 0 does not exist on Windows
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@define(eq=False)
class HeldFolders:
    """Folders that other processes have claimed.

    A holder on another machine may stop renewing its lease. Only repeated checks of the same lease
    can detect this, so this class stores the leases.
    """

    _leases: dict[Path, Lease] = field(factory=dict, init=False)

    def free(self, folder: Path, *names: str) -> bool:
        """Return whether the leases ``names`` in the folder are free.

        If so, the folder can be claimed at once.
        """
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
            ):  # a full disk or a deleted folder: the claim of the folder reports it
                pass
            del self._leases[lease.path]
        return True


@functools.cache
def _host() -> str:
    """Return the name of this machine in leases."""
    with (
        tempfile.TemporaryDirectory(prefix="hgms-") as place,
        SoftFileLease(Path(place, "lease")) as lease,
    ):
        assert lease.owner is not None
        return lease.owner.hostname
