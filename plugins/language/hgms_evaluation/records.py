"""One JSON object per line, appended as the work goes: what is written stays, and an interrupted write is dropped."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms_core import CheckpointError
from hgms_run import replace_file


def read(path: Path, *, needs: Sequence[str] = ("id", "turn")) -> list[dict[str, Any]]:
    """The records of ``path`` ([] if there is no such file), each with the fields that are needed. A last line without its
    newline was cut off while it was being written: it is removed from the file, so that what is appended next starts on a line
    of its own."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with _opened(path, "r+b") as file:
            file.truncate(whole)
    rows = []
    for number, text in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError("not a JSON object")
            if missing := [name for name in needs if name not in record]:
                raise ValueError(f"no {' and no '.join(map(repr, missing))}")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path}, line {number}: {error}\n  remove that line (its question is then asked again)"
            ) from None
        rows.append(record)
    return rows


class Journal:
    """A file of records open for appending; each is on disk when ``write`` returns. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(path, "a", encoding="utf-8")
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


def table(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"damaged file {path}: {error}\n  remove the folder {path.parent}; it is then made again"
        ) from None
    return value


def _opened(path: Path, mode: str, **options: Any) -> Any:
    """Opened for writing; through a symbolic link somebody else's folder could have any file of ours written to."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    try:
        return open(path, mode, opener=opener, **options)
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else error.strerror or str(error)
        raise CheckpointError(f"cannot write {path}: {why}\n  choose another folder, or remove it") from None


def line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def write_table(path: Path, value: object) -> None:
    """Writes a whole file of JSON, or leaves the old one as it was."""
    replace_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole file of records, or leaves the old one as it was."""
    replace_file(path, "".join(map(line, rows)).encode())
