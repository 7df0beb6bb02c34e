"""Files of the cache, each with its checksum in its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from hgms.store.digests import cache_folder, digest
from hgms.store.files import DiskError, replace_file

DIGITS = 32
"""Length of a key, and of the checksum, in the name of a file."""


@frozen
class SavedFile:
    """The files of one key in the folder ``kind`` of the cache; they can be deleted at any time.

    Processes that write the same key at the same time leave an undamaged file.
    """

    kind: str
    key: str
    suffix: str

    def contents(self) -> Iterator[tuple[Path, bytes]]:
        """Yield the undamaged files and their contents."""
        for path in sorted(cache_folder(self.kind).glob(f"{self.key}-*{self.suffix}")):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if path == self._path(content):
                    yield path, content

    def store(self, content: bytes) -> None:
        """Write a file, if the cache is writable."""
        with contextlib.suppress(OSError, DiskError):
            path = self._path(content)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)

    def delete(self) -> None:
        """Delete the files."""
        with contextlib.suppress(OSError):
            for path, _ in self.contents():
                path.unlink()

    def _path(self, content: bytes) -> Path:
        name = f"{self.key}-{digest(content)[:DIGITS]}{self.suffix}"
        return cache_folder(self.kind) / name
