"""Commands, and the blocks of pages, in processes of their own that start at once: a server imports
once, and forks for each.

An interpreter with torch takes seconds to start, which a test of many commands would spend on
importing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

# `-P`, as for the installed script: the folder that a command runs in is not on the path.
LIBRARIES = """
import contextlib, importlib, importlib.metadata, json, os, runpy, signal, sys, traceback
import torch
with contextlib.suppress(ImportError):
    import sklearn.datasets
torch.set_num_threads(1)
# the first call imports hundreds of modules
torch.func.vmap(torch.func.grad(torch.sum))(torch.ones(2, 2))
"""

COMMANDS = """
import hgms.cli.group, hgms.comparison, hgms.report
for point in importlib.metadata.entry_points(group="hgms"):
    with contextlib.suppress(Exception):  # the command will say so
        importlib.import_module(point.module)
main = hgms.cli.group.main
"""

SCRIPTS = """
def main(arguments):
    folder, *sys.argv[:] = arguments
    signal.alarm(300)
    os.chdir(folder)
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)
"""

SERVER = """
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        folder, *arguments = json.loads(line)
        os.chdir(folder)
        for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin.close()
        try:
            main(arguments)
        except SystemExit as error:
            sys.stdout.flush()
            os._exit(error.code or 0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(99)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@frozen
class Ended:
    """A command that has ended, with its exit code (−9: killed by signal 9) and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


class Server:
    """Starts `hgms …` in a folder, any number of times, one after the other. What it writes is in
    the files ``out`` and ``err`` there. With ``program = SCRIPTS`` it starts scripts instead (a
    folder to run in, the script, its arguments), which may take five minutes each, and has imported
    libraries alone.
    """

    def __init__(self, program: str = COMMANDS) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", LIBRARIES + program + SERVER]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, folder: Path, *arguments: str) -> int:
        """The number of the command's process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), *arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def end(self) -> int:
        """Waits for the command; its exit code."""
        return int(self._line())

    def run(self, folder: Path, *arguments: str) -> Ended:
        """A command from its start to its end."""
        self.start(folder, *arguments)
        code = self.end()
        return Ended(
            code,
            (folder / "out").read_text(encoding="utf-8"),
            (folder / "err").read_text(encoding="utf-8"),
        )

    def close(self) -> None:
        self._process.communicate(timeout=60)


def forked(function: Callable[[], object]) -> int:
    """The number of a process that calls the function, and ends with it."""
    if process := os.fork():
        return process
    try:
        function()
    finally:
        os._exit(1)


def rows_written(folder: Path) -> int:
    """Rows of all runs below ``folder``."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("steps.jsonl"))


def strike(process: int, folder: Path, rows: int, blow: int, wait: float = 0.0) -> None:
    """Sends the signal ``blow`` once the runs below ``folder`` have written so many rows, and
    ``wait`` seconds more, however long that takes on a busy machine; a process that is gone is
    noticed.
    """
    until = time.monotonic() + 600
    while rows_written(folder) < rows:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            pytest.fail(f"it ended before it was struck: {(folder / 'err').read_text()}")
        assert time.monotonic() < until, (folder / "err").read_text()
        time.sleep(0.001)
    time.sleep(wait)
    os.kill(process, blow)


def started(
    folder: Path, *arguments: str, before: Sequence[str] = (), **options: Any
) -> subprocess.Popen[str]:
    """`hgms …` in a process of its own, with ``before`` in front of the command."""
    return subprocess.Popen(
        [*before, sys.executable, "-P", "-m", "hgms", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def reaches(folder: Path, rows: int, *processes: subprocess.Popen[str]) -> None:
    """Waits until the runs have so many rows, as long as the processes live."""
    until = time.monotonic() + 300
    while rows_written(folder) < rows:
        assert time.monotonic() < until
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.02)
