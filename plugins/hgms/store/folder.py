"""One artifact on disk: a folder with a manifest, checksums, atomic writes and a lease.

::

    manifest.json     key, status, facts, the size and sha256 of each recorded file, a checksum
    .lease            the process that works on the folder

Runs, stages, checkpoints and caches are such folders. The manifest is the only pointer: a file
counts once :meth:`Folder.commit` has recorded it. A log may grow after that;
:meth:`Folder.rewind` cuts it back to its recorded length.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from attrs import asdict, field, frozen

from hgms.arguments import require
from hgms.store import files
from hgms.store.digests import Digest, digest, file_digest
from hgms.store.lease import LEASE, Lease, hold_lease, is_marker
from hgms_core.errors import CheckpointError

MANIFEST = "manifest.json"
STATUSES = ("new", "open", "done")
PIECE = 2**24
"""Number of bytes of a log that are read at a time."""


@frozen
class FileRecord:
    """The recorded size and sha256 of a file."""

    bytes: int
    sha256: str


@frozen(kw_only=True)
class Manifest:
    """The record of a folder.

    ``key`` is the digest of the inputs. ``status`` is "new" for a folder without manifest, "open",
    or "done". ``facts`` are JSON values, and ``files`` the recorded files by name.
    """

    key: str
    status: str = "new"
    facts: Mapping[str, Any] = field(factory=dict)
    files: Mapping[str, FileRecord] = field(factory=dict)


@frozen(eq=False)
class Folder:
    """The artifact at ``path``; ``key`` is the digest of all its inputs.

    The constructor creates no files. A process that writes takes the :meth:`lease` first, unless
    it has a lease of a folder around this one. Names of files are relative, with ``/``.

    Raises
    ------
    CheckpointError
        ``other-settings`` for a folder with another key; ``damaged-file`` for a file that differs
        from its record; ``not-a-file`` for links, pipes and devices, which are never followed or
        opened.
    FolderInUse
    DiskError
        If a file cannot be written. The place is the path.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     folder = Folder(Path(place, "mine"), key="1")
    ...     with folder.lease():
    ...         folder.write("weights", b"0.5")
    ...         folder.append({"log": b"one"})
    ...         folder.commit(["weights", "log"], facts={"step": 1}, done=True)
    ...         folder.append({"log": b"two"})
    ...         folder.rewind("log")
    ...         folder.read("weights"), folder.read("log"), folder.manifest().facts
    ...     folder.is_done()
    (b'0.5', b'one', {'step': 1})
    True
    """

    path: Path = field(converter=Path)
    key: str
    _leases: list[Lease] = field(factory=list, init=False, repr=False)
    _contents: dict[str, Digest] = field(factory=dict, init=False, repr=False)
    """Digests of the files that this object wrote: commits do not read these files again."""
    _unflushed: set[str] = field(factory=set, init=False, repr=False)

    # --- the lease

    @contextlib.contextmanager
    def lease(self, *, patience: float | None = None) -> Iterator[None]:
        """Take the folder for this process, and create it if necessary.

        If another process has it, wait for ``patience`` seconds (``None``: until that process is
        known to be alive).
        """
        with hold_lease(self.path, LEASE, patience=patience) as lease:
            self._leases.append(lease)
            try:
                self.manifest()
                yield
            finally:
                self._leases.remove(lease)
                self._contents.clear()
                self._unflushed.clear()

    def ensure_held(self) -> None:
        """Raise FolderInUse if another process has taken over the folder."""
        for lease in self._leases:
            lease.ensure()

    # --- reading

    def manifest(self) -> Manifest:
        """Return the manifest."""
        manifest = read_manifest(self.path)
        if manifest is None:
            return Manifest(key=self.key)
        require(
            manifest.key == self.key,
            "other-settings",
            "the folder belongs to other settings or data",
            place=(str(self.path / MANIFEST),),
            hint=f"use another folder, or remove {self.path}; it is unchanged",
            error=CheckpointError,
        )
        return manifest

    def is_done(self) -> bool:
        """Return whether the artifact is complete: its status is "done", and no file is missing.

        Raises
        ------
        CheckpointError
            ``damaged-file`` for a file with its recorded size, but other contents.

        Notes
        -----
        Cost: one pass over the recorded files.
        """
        manifest = self.manifest()
        if manifest.status != "done":
            return False
        if not all(self._has_size(name, record.bytes) for name, record in manifest.files.items()):
            return False
        for name, record in manifest.files.items():
            if file_digest(self.path / name) != record.sha256:
                raise _differs(self.path / name)
        return True

    def read(self, name: str) -> bytes:
        """Return the contents of a recorded file."""
        record = self._record_of(name)
        return self._read_verified(name, record, has_grown=False)

    def read_log(self, name: str) -> bytes:
        """Return the contents of a log, after a check of the recorded part.

        A log without record is not checked; without a file it is empty. If the status is "done", a
        log that has grown is damaged.
        """
        manifest = self.manifest()
        record = manifest.files.get(name)
        if record is not None:
            return self._read_verified(name, record, has_grown=manifest.status != "done")
        path = self.path / name
        return files.contents(path) if os.path.lexists(path) else b""

    def verified_path(self, name: str) -> Path:
        """Return the path of a recorded file that is too large for :meth:`read`.

        Notes
        -----
        Cost: one pass over the file.
        """
        record = self._record_of(name)
        path = self.path / name
        if not self._has_size(name, record.bytes) or file_digest(path) != record.sha256:
            raise _differs(path)
        return path

    # --- writing

    def write(self, name: str, data: bytes | Iterable[files.Buffer]) -> None:
        """Replace a file atomically by ``data``, or by its pieces in order.

        Folders of the file are created if necessary.
        """
        self.ensure_held()
        path = self.path / name
        with files.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        contents = Digest()
        pieces = [data] if isinstance(data, bytes) else data
        files.replace_file(path, _add_to_digest(pieces, contents))
        self._contents[name] = contents
        self._unflushed.discard(name)

    def append(self, data: Mapping[str, bytes]) -> None:
        """Append to logs, by name. The operating system has the data when this returns."""
        self.ensure_held()
        for name, added in data.items():
            contents = self._contents_of(name)
            files.append(self.path / name, added)
            contents.add(added)
            self._unflushed.add(name)

    def rewind(self, name: str) -> None:
        """Cut a log back to its recorded length. A log without record becomes empty."""
        self.ensure_held()
        path = self.path / name
        record = self.manifest().files.get(name)
        kept = Digest()
        if record is not None or os.path.lexists(path):
            recorded = 0 if record is None else record.bytes
            with files.open_file(path, sys.maxsize, files.remedy(path)) as stream:
                for piece in _pieces(stream, recorded):
                    kept.add(piece)
                if record is not None and kept.text != record.sha256:
                    raise _differs(path)
                if os.fstat(stream.fileno()).st_size > recorded:
                    stream.seek(0)
                    files.replace_file(path, _pieces(stream, recorded))
        self._contents[name] = kept
        self._unflushed.discard(name)

    def commit(
        self,
        names: Iterable[str],
        *,
        facts: Mapping[str, Any],
        done: bool = False,
        keep: Iterable[str] = (),
    ) -> None:
        """Record these files, and facts, in one atomic step. All other files lose their record.

        The records of ``keep`` stay as they are; their files are not read. Everything recorded is
        on the disk before the manifest, and the manifest when this returns.
        """
        self.ensure_held()
        names = list(names)
        before = self.manifest().files if (keep := list(keep)) else {}
        records = {name: before[name] for name in keep if name in before}
        records |= {name: self._flush(name) for name in names}
        for folder in sorted({(self.path / name).parent for name in names} | {self.path}):
            files.flush(folder)
        manifest = {
            "key": self.key,
            "status": "done" if done else "open",
            "facts": dict(facts),
            "files": {name: asdict(record) for name, record in records.items()},
        }
        files.replace_file(self.path / MANIFEST, with_checksum(manifest))
        files.flush(self.path)

    def remove_unrecorded(self, pattern: str) -> None:
        """Remove the files with names like ``pattern`` that the manifest does not record.

        Files that cannot be removed stay, because no record refers to them.
        """
        self.ensure_held()
        recorded = {MANIFEST, *self.manifest().files}
        for path in self.path.glob(pattern):
            name = path.relative_to(self.path).as_posix()
            if name not in recorded and not is_marker(name):
                with contextlib.suppress(OSError):
                    path.unlink()

    # --- records

    def _record_of(self, name: str) -> FileRecord:
        record = self.manifest().files.get(name)
        if record is None:
            raise files.damaged_file(self.path / MANIFEST, f"it does not record {name!r}")
        return record

    def _read_verified(self, name: str, record: FileRecord, has_grown: bool) -> bytes:
        """Return the contents of a file, which may only have grown since its record."""
        path = self.path / name
        with files.open_file(path, sys.maxsize, files.remedy(path)) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < record.bytes or (size > record.bytes and not has_grown):
                raise files.damaged_file(path, f"its size is {size:,}, not {record.bytes:,} bytes")
            data = stream.read()
        if Digest(memoryview(data)[: record.bytes]).text != record.sha256:
            raise _differs(path)
        return data

    def _has_size(self, name: str, size: int) -> bool:
        """Return whether a regular file exists with this size."""
        try:
            about = os.lstat(self.path / name)
        except OSError:
            return False
        return stat.S_ISREG(about.st_mode) and about.st_size == size

    def _contents_of(self, name: str) -> Digest:
        """Return the running digest of a log, which is read at most once."""
        if name not in self._contents:
            path = self.path / name
            self._contents[name] = Digest(files.contents(path) if os.path.lexists(path) else b"")
        return self._contents[name]

    def _flush(self, name: str) -> FileRecord:
        """Flush a file to the disk, unless it is there already, and return its record."""
        path = self.path / name
        contents = self._contents.get(name)
        if contents is not None:
            if name in self._unflushed:
                files.flush(path)
                self._unflushed.remove(name)
            return FileRecord(contents.size, contents.text)
        with files.open_file(path, sys.maxsize, files.remedy(path)) as stream:
            size = os.fstat(stream.fileno()).st_size
        files.flush(path)
        return FileRecord(size, file_digest(path))


def with_checksum(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON, with the sha256 of all other entries as its last entry."""
    table = {**manifest, "checksum": _checksum(manifest)}
    return json.dumps(table, indent=1, ensure_ascii=False).encode(errors="backslashreplace")


def _checksum(table: Mapping[str, Any]) -> str:
    return digest(json.dumps(table))


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the folder with any key; None without a manifest.

    Raises
    ------
    CheckpointError
        If the manifest is damaged, or is not a regular file.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    table = files.json_object(path)
    if table.pop("checksum", None) != _checksum(table):
        raise files.damaged_file(path, "its contents do not match its checksum")
    try:
        manifest = Manifest(
            key=table["key"],
            status=table["status"],
            facts=dict(table["facts"]),
            files={name: FileRecord(**record) for name, record in table["files"].items()},
        )
        whole = (
            isinstance(manifest.key, str)
            and manifest.status in STATUSES
            and all(map(_is_inside, manifest.files))
            and all(isinstance(record.bytes, int) for record in manifest.files.values())
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise files.damaged_file(path, "it is not a manifest")
    return manifest


def _is_inside(name: str) -> bool:
    """Return whether a name is below the folder; a manifest may be from an untrusted source."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _pieces(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the next ``size`` bytes of a file, or fewer at its end, in pieces."""
    while piece := stream.read(min(PIECE, size)):
        size -= len(piece)
        yield piece


def _add_to_digest(pieces: Iterable[files.Buffer], contents: Digest) -> Iterator[files.Buffer]:
    for piece in pieces:
        contents.add(piece)
        yield piece


def _differs(path: Path) -> CheckpointError:
    return files.damaged_file(path, "its contents do not match the recorded sha256")
