"""One JSON object per line, appended as the work goes: what is written stays, and an interrupted write is dropped."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hgms_core import CheckpointError


def read(path: Path) -> list[dict[str, Any]]:
    """The records of ``path`` ([] if there is no such file). A last line without its newline was cut off while it was being
    written: it is removed from the file, so that what is appended next starts on a line of its own."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    found = []
    for number, text in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            raise CheckpointError(
                f"{path}, line {number}: {error}\n  remove that line (its question is then asked again)"
            ) from None
        found.append(record)
    return found


class Journal:
    """A file of records open for appending; each is on disk when ``write`` returns. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(line(record))
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def replace(path: Path, text: str) -> None:
    """Writes a whole file, or leaves the old one as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def to_json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def digest(value: object) -> str:
    """SHA-256 of the value's JSON.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
