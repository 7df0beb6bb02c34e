"""What a command may do with bad input: leave with 2 and one message, or with the right result.
All else is a violation.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from campaigns.child import Ending

SECRET = "7f3a-not-to-be-seen-9c1e"
"""Stands in a file beside the folder that a command works in: nothing printed or written may
hold it.
"""

LONGEST = 20_000
"""Characters of a message that a person can still be asked to read."""

FAILED = re.compile(r"step \d+|out of memory|cannot write|cannot use|failed", re.IGNORECASE)
"""What a message says where the input was sound and the run itself failed, which leaves with 1."""


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x9b]")


def faults(ending: Ending, *, stopped: bool = False) -> Iterator[str]:
    """What is wrong with how a command ended; ``stopped``: it was accepted, ran, and was stopped
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
    """A folder that no command has any business in, with a secret in it."""
    outside = scratch / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_text(SECRET + "\n")
    (outside / "precious.json").write_text('{"kept": true}\n')
    (outside / "folder").mkdir()
    return outside


def snapshot(folder: Path, *, without: tuple[str, ...] = (".lock",)) -> dict[str, object]:
    """Every entry below a folder: what a file holds, where a link points, what else it is."""
    held: dict[str, object] = {}
    for directory, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if name in without:
                continue
            if stat.S_ISLNK(mode):
                what: object = ("link", os.readlink(path))
            else:
                what = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
            held[path.relative_to(folder).as_posix()] = what
    return held


def changed(before: dict[str, object], after: dict[str, object], *, new: bool = False) -> list[str]:
    """The entries that are gone or others; with ``new`` also those that came."""
    lost = [
        f"{name} {'is other' if name in after else 'is gone'}"
        for name in before
        if before[name] != after.get(name)
    ]
    return lost + [f"{name} is new" for name in after if new and name not in before]
