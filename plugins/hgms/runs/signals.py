"""Signals that request the end of a run.

The run finishes the current step and saves its state.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

import click

STOPPING = "stopping: the running step is finished and saved; a second Ctrl-C stops at once"
COMPILING = "stopping: after the function that is being compiled; a second Ctrl-C stops at once"
STOPS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that request a stop.

They are sent by Ctrl-C, by a batch system at its time limit, and by a closed terminal.
"""
CONTINUES = tuple(getattr(signal, name) for name in ("SIGCONT",) if hasattr(signal, name))
"""The signal that continues a stopped process."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the signal ``number``, ended the run.

    The state is saved; ``hint`` describes how to resume.
    """

    def __init__(
        self, message: str, number: int = signal.SIGINT, *, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.number = number
        self.hint = hint

    @staticmethod
    def number_of(error: KeyboardInterrupt) -> int:
        """Return the signal of an interruption; SIGINT for another KeyboardInterrupt."""
        return error.number if isinstance(error, Interrupted) else signal.SIGINT

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


LEAVING = threading.Event()
"""Set if the provider of this machine has requested this process to end.

From then on, a SystemExit is not a failure of the run.
"""


class Interrupts(contextlib.ExitStack):
    """Let the current step finish after the first Ctrl-C, SIGTERM or SIGHUP.

    All written files are then complete. The first signal also prints a message to standard error. A
    second signal stops at once. ``number`` is the received signal (``None``: no signal yet).
    ``compiling()`` returns whether functions of the step are being compiled. Compilation ends
    before the step.
    """

    def __init__(self, compiling: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.number: int | None = None
        self._compiling = compiling

    def __enter__(self) -> Self:
        self.enter_context(_handling(self._stop, STOPS))
        return self

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise Interrupted("interrupted", number)
        self.number = number
        # Standard error may be closed, or the signal may interrupt the output of another line.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            click.echo(COMPILING if self._compiling() else STOPPING, err=True)


@contextlib.contextmanager
def counted_suspensions() -> Iterator[Callable[[], int]]:
    """Count how often this process continues after a stop (SIGSTOP, Ctrl-Z).

    The count covers the time inside the context.
    """
    numbers: list[int] = []

    def count_signal(number: int, _frame: FrameType | None) -> None:
        numbers.append(number)

    with _handling(count_signal, CONTINUES):
        yield lambda: len(numbers)


@contextlib.contextmanager
def nothing_saved() -> Iterator[None]:
    """Replace KeyboardInterrupt by Interrupted for a run without a state.

    An example is Ctrl-C during the import of plugins.
    """
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted("interrupted before the first step, so nothing is saved") from None


def stoppable() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end the code inside the context in the same way as Ctrl-C."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted("interrupted", number)

    return _handling(stop, STOPS[1:])


@contextlib.contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]
) -> Iterator[None]:
    """Set the handler of these signals inside the context.

    Only the main thread may set handlers. Signals that nohup has set to be ignored stay ignored.
    """
    before: list[tuple[int, Any]] = []
    if threading.current_thread() is threading.main_thread():
        before = [(number, signal.getsignal(number)) for number in numbers]
        before = [
            (number, old)
            for number, old in before
            if number == signal.SIGINT or old is not signal.SIG_IGN
        ]
    try:
        for number, _ in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before:
            signal.signal(number, signal.SIG_DFL if old is None else old)
