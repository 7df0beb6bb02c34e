"""Files with one JSON object per line, appended during the work.

Written records are kept; an incomplete last record is removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms.store import append, flush, replace_file
from hgms_core.errors import CheckpointError
from hgms_core.torch_errors import first_line


def by_turn(path: Path, needs: Sequence[str]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the records of ``path`` by question and turn (empty if the file does not exist).

    ``needs`` lists required fields. If a turn has two records, the later record counts. A last line
    without newline is an interrupted write. The function removes it from the file, so that the next
    record starts on a new line.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        replace_file(path, data[:whole])
    records = {}
    for number, text in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            record = json.loads(text)
            if missing := {"id", "turn", *needs}.difference(record):
                raise ValueError(f"no {' and no '.join(map(repr, sorted(missing)))}")
            records[record["id"], record["turn"]] = record
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                "wrong-row",
                f"the record is damaged: {first_line(error)}",
                place=(str(path), number),
                hint="remove this line and repeat the command, which generates the record",
            ) from None
    return records


def add(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record, which is on disk when this function returns.

    Raises
    ------
    DiskError
        If the file cannot be written, or is a symbolic link: a link in another user's folder could
        redirect the write to any of your files.
    """
    append(path, _line(record))
    flush(path)


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file by these records, in one atomic step."""
    replace_file(path, b"".join(map(_line, records)))


def replace(path: Path, value: object) -> None:
    """Replace the file by a value as JSON, or leave the old file unchanged."""
    replace_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
