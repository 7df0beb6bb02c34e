"""Run a command line in a forked child, within milliseconds, because the parent has all imports.

The child has a separate folder and limits of memory and seconds. It may be killed by a signal at a
moment, or during one of its writes.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import define, frozen

SECONDS = 10.0
"""The maximum processor time of a command; ten times as much by the clock."""
MEMORY = 6 << 30
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@frozen
class Ending:
    """The end of a command: exit code (or minus the signal), output, time, and counted
    ``operations`` on files.
    """

    code: int
    out: str
    err: str
    seconds: float
    operations: int = 0
    late: bool = False


@define
class Strike:
    """Counts the operations that change files, and kills its process at operation ``at``: before
    it, after it, or with half of the bytes written. ``at`` = 0 only counts.
    """

    at: int = 0
    when: str = "before"
    count: int = 0

    def install(self) -> None:
        """Wrap the functions through which Python changes files."""
        for name in (
            "replace",
            "rename",
            "unlink",
            "remove",
            "fsync",
            "mkdir",
            "truncate",
            "link",
            "symlink",
        ):
            setattr(os, name, self._around(getattr(os, name)))
        os.write = self._halved(os.write)  # type: ignore[assignment]
        real = io.open

        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, *rest, **named)
            stream = self._around(real)(file, mode, *rest, **named)
            with contextlib.suppress(AttributeError):  # an unbuffered stream has no attributes
                stream.write = self._halved(stream.write, stream.flush)
            return stream

        io.open = builtins.open = opened  # type: ignore[assignment]

    def _due(self) -> bool:
        self.count += 1
        return self.count == self.at

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*arguments: Any, **named: Any) -> Any:
            due = self._due()
            if due and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return struck

    def _halved(
        self, write: Callable[..., Any], flush: Callable[[], None] = lambda: None
    ) -> Callable[..., Any]:
        def struck(*arguments: Any) -> Any:
            *before, data = arguments
            if self._due():
                if self.when != "before":
                    write(*before, data[: len(data) // 2] if self.when == "midst" else data)
                    flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*before, data)

        return struck


def processor_seconds(process: int) -> float:
    """Return the processor time of a process so far; 0 if it is gone, or without /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def call(
    argv: Sequence[str],
    folder: Path,
    *,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    strike: Strike | None = None,
    signals: Sequence[tuple[float, int]] = (),
    enough: Callable[[], bool] = lambda: False,
) -> Ending:
    """Run ``hgms ARGV`` in ``folder``.

    ``signals`` are (seconds after the start, signal). After one second, and then every quarter of a
    second, ``enough`` checks whether the command may be killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.parent / "log"
    log.mkdir(exist_ok=True)
    (log / "operations").unlink(missing_ok=True)
    for name in ("out", "err"):
        (log / name).write_bytes(b"")
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)  # a child receives signals only after the fork
    child = os.fork()
    if child == 0:
        _become(argv, folder, log, memory, strike)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    late = False
    coming = sorted(signals)
    ask = began + 1.0
    with _reaped(child) as ended:
        while not ended():
            now = time.monotonic()
            if coming and now - began >= coming[0][0]:
                os.kill(child, coming.pop(0)[1])
            elif processor_seconds(child) > seconds or now - began > 10 * seconds:
                late = True
                os.killpg(child, signal.SIGKILL)
                seconds = float("inf")
            elif now > ask:
                ask = now + 0.25
                if enough():
                    os.killpg(child, signal.SIGKILL)
            time.sleep(0.0005 if coming else 0.003)
        status = ended() or 0
    texts = [
        (log / name).read_bytes()[: 1 << 24].decode(errors="replace") for name in ("out", "err")
    ]
    counted = log / "operations"
    operations = int(counted.read_text() or 0) if counted.exists() else 0
    return Ending(
        os.waitstatus_to_exitcode(status - 1), *texts, time.monotonic() - began, operations, late
    )


@contextlib.contextmanager
def _reaped(child: int) -> Iterator[Callable[[], int | None]]:
    """Return the child's status + 1 if it has ended, else 0; at the end, remove all its
    processes.
    """
    known: list[int] = []

    def ended() -> int | None:
        if not known:
            process, status = os.waitpid(child, os.WNOHANG)
            if process:
                known.append(status + 1)
        return known[0] if known else None

    try:
        yield ended
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # processes of the child
        if not known:
            os.waitpid(child, 0)


def _become(
    argv: Sequence[str], folder: Path, log: Path, memory: int, strike: Strike | None
) -> None:
    """Become the child: a separate process that never returns."""
    code = 70
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        for number in HEARD:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        for number, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8") for number in (1, 2)
        )
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if strike is not None:
            strike.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        code = _main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        if strike is not None:
            strike.at = 0
            (log / "operations").write_text(str(strike.count))
    finally:
        os._exit(code)


def _main(argv: Sequence[str]) -> int:
    from hgms.cli.group import main

    try:
        main(list(argv), prog_name="hgms")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def ready(*commands: Sequence[str], folder: Path) -> None:
    """Import all modules of the commands, so no child imports them.

    Commands run only in a child.
    """
    import sklearn.datasets  # noqa: F401
    import torch

    from hgms.plugins import Host

    torch.set_num_threads(1)
    Host.load()
    for argv in commands:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                os.chdir(folder)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                _main(argv)
                (folder / "modules").write_text("\n".join(sys.modules))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for name in (folder / "modules").read_text().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
