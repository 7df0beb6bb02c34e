"""Valid reactions of a command to bad input: exit code 2 with one message, or the correct
result.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from campaigns.child import Ending
from hgms.store import is_marker

SECRET = "7f3a-not-to-be-seen-9c1e"
"""The content of a file next to the working folder: no output may contain it."""

LONGEST = 20_000
"""The maximum length of a readable message."""

FAILED = re.compile(r"step \d+|out of memory|cannot write|cannot use|failed", re.IGNORECASE)
"""Messages of a run that failed with valid input, with exit code 1."""


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x9b]")


def faults(ending: Ending, *, stopped: bool = False) -> Iterator[str]:
    """Return the violations at the end of a command; ``stopped``: it was accepted and stopped
    for time.
    """
    last = " / ".join(ending.err.strip().splitlines()[-3:])[-300:]
    output = ending.err + ending.out
    messages = len(re.findall(r"^error: ", ending.err, re.MULTILINE | re.IGNORECASE))
    held = {
        f"a traceback: {last}": "Traceback (most recent call last)" in output,
        f"over {ending.seconds:.0f} s": ending.late,
        f"killed by signal {-ending.code}: {last}": ending.code < 0
        and not stopped
        and not ending.late,
        f"exit code {ending.code}: {last}": ending.code > 2,
        f"exit code 1 without a failure of the run: {last}": ending.code == 1
        and not FAILED.search(ending.err),
        f"{messages} messages: {last}": messages != 1 and ending.code == 2,
        f"{len(ending.err):,} characters of messages: {ending.err[:80]!r} …": len(ending.err)
        > LONGEST,
        "it printed a file that it was not to read": SECRET in output,
        f"control characters reach the terminal: {last!r}": bool(CONTROL.search(output)),
    }
    yield from (what for what, holds in held.items() if holds)


def beside(scratch: Path) -> Path:
    """Return a folder with a secret that no command may use."""
    outside = scratch / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_text(SECRET + "\n")
    (outside / "precious.json").write_text('{"kept": true}\n')
    (outside / "folder").mkdir()
    return outside


def snapshot(folder: Path) -> dict[str, object]:
    """Return every entry below a folder: content, target of a link, or other type.

    Markers of leases are excluded, because they belong to no run.
    """
    held: dict[str, object] = {}
    for directory, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if is_marker(name):
                continue
            if stat.S_ISLNK(mode):
                what: object = ("link", os.readlink(path))
            else:
                what = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
            held[path.relative_to(folder).as_posix()] = what
    return held


def changed(before: dict[str, object], after: dict[str, object], *, new: bool = False) -> list[str]:
    """Return removed and changed entries; with ``new`` also added ones."""
    lost = [
        f"{name} {'is other' if name in after else 'is gone'}"
        for name in before
        if before[name] != after.get(name)
    ]
    return lost + [f"{name} is new" for name in after if new and name not in before]
