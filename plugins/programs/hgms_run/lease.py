"""Who may write to a folder that several processes, or several machines, share."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import define, field
from filelock import SoftFileLease, Timeout

from hgms_core import CheckpointError
from hgms_run import files

LEASE = ".lease"
"""The file in a run's folder that says who has it."""
SECONDS = 60.0
"""How long a holder may give no sign of life before another machine takes its folder over. It gives one three times as often.
On the holder's own machine nobody waits: a process that is gone is seen to be gone. All who share a folder must agree on it."""


class FolderInUse(CheckpointError):
    """Another process writes to the folder."""


@define(eq=False)
class Lease:
    """A folder held by this process: a file ``.lease`` in it that says who holds it, and is touched every few seconds.

    It works where a lock of the operating system does not (NFS), and needs no clock that two machines share: who waits measures
    with its own how long the file stays as it is. A lease expires, so it cannot keep a process from writing that slept through
    its own; that one asks :meth:`ensure` before each write. Between question and write some microseconds are left.

    .. versionadded:: 0.8"""

    path: Path
    _lease: SoftFileLease = field(init=False)
    _marker: tuple[int, int] = field(default=(0, 0), init=False)

    def acquire(self, patience: float) -> None:
        """FolderInUse where another process holds it and goes on holding it for ``patience`` seconds."""
        self._lease = SoftFileLease(self.path, lease_duration=SECONDS, timeout=patience)
        if self.path.is_symlink():
            self.path.unlink()
        try:
            self._lease.acquire()
        except Timeout:
            where = self.path.parent
            raise FolderInUse(f"another process is writing to {where}; wait for it, or choose another folder") from None
        about = self.path.stat()
        self._marker = about.st_dev, about.st_ino

    def ensure(self) -> None:
        """FolderInUse where another process has taken the folder over."""
        for pause in (0.05, 0.5, None):  # a process that looks at the marker may move it aside for a moment
            with contextlib.suppress(FileNotFoundError):
                about = os.lstat(self.path)
                if (about.st_dev, about.st_ino) == self._marker and self._lease.compromise is None:
                    return
                break
            if pause is not None:
                time.sleep(pause)
        raise FolderInUse(
            f"another process has taken over {self.path.parent}: this one gave no sign of life for {SECONDS:.0f} s\n"
            "  nothing more is written here; what the other does is kept"
        )

    def release(self) -> None:
        self._lease.release()


@contextlib.contextmanager
def leased(folder: Path, name: str = LEASE, *, patience: float = 0.0) -> Iterator[Lease]:
    """The folder, which is made if need be, for this process alone.

    Raises:
        FolderInUse: another process holds it, still after ``patience`` seconds.
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
