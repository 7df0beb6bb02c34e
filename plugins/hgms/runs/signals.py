"""Signals that ask a run to stop: its running step is finished and its state saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import click

STOPPING = "stopping: the running step is finished and saved; a second Ctrl-C stops at once"
COMPILING = "stopping: after the function that is being compiled; a second Ctrl-C stops at once"
STOPS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that ask a run to stop: Ctrl-C, a batch system whose time is up, a terminal that is
closed.
"""
CONTINUES = tuple(getattr(signal, name) for name in ("SIGCONT",) if hasattr(signal, name))
"""The signal with which a stopped process continues."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the signal ``number``. The state is saved; ``hint`` is how to resume."""

    def __init__(
        self, message: str, number: int = signal.SIGINT, *, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.number = number
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


_LEAVING = threading.Event()


def leave() -> None:
    """From here on this process is asked to go by whoever lent its machine: a SystemExit is no
    failure of what runs in it.
    """
    _LEAVING.set()


def leaving() -> bool:
    """Whether :func:`leave` was called."""
    return _LEAVING.is_set()


class Interrupts:
    """Lets the running step finish on the first Ctrl-C, SIGTERM or SIGHUP, so that what is written
    is whole, and says so on standard error; a second one stops at once. ``number`` is the signal
    that came (None: none so far). ``compiling()`` is whether functions of the step are being
    compiled, which ends before the step.
    """

    def __init__(self, compiling: Callable[[], bool] = lambda: False) -> None:
        self.number: int | None = None
        self._compiling = compiling
        self._handling = _handling(self._stop, STOPS)

    def __enter__(self) -> Interrupts:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handling.__exit__(*error)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            raise Interrupted("interrupted", number)
        self.number = number
        # Standard error may be closed, or the signal came in the middle of another line of it.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            click.echo(COMPILING if self._compiling() else STOPPING, err=True)


@contextlib.contextmanager
def counted_suspensions() -> Iterator[Callable[[], int]]:
    """Inside, count how often this process continued after a stop (SIGSTOP, Ctrl-Z)."""
    numbers: list[int] = []

    def continued(number: int, _frame: FrameType | None) -> None:
        numbers.append(number)

    with _handling(continued, CONTINUES):
        yield lambda: len(numbers)


@contextlib.contextmanager
def nothing_saved() -> Iterator[None]:
    """Inside, Ctrl-C ends a run that has no state yet, as while plugins are imported."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        message = "interrupted before the first step, so nothing is saved"
        raise Interrupted(message) from None


def stoppable() -> contextlib.AbstractContextManager[None]:
    """SIGTERM and SIGHUP end what is inside as Ctrl-C does."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted("interrupted", number)

    return _handling(stop, STOPS[1:])


@contextlib.contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]
) -> Iterator[None]:
    """Inside, these signals have this handler, which only the main thread may set. What nohup told
    the process to ignore stays ignored."""
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
