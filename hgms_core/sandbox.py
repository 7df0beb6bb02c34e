"""What a plugin's code may do to the rest of the process while it runs: it is watched, and undone."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import define, field

Settings = dict[str, tuple[Any, Callable[[Any], Any]]]
"""What a process has one of, by name: the value and how to set it."""


VARIABLES = (
    "HGMS_DATA",
    "HGMS_PLUGINS",
    "HGMS_DISABLE_PLUGINS",
    "HGMS_STRICT_PLUGINS",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
"""What the environment says to everybody here."""


@define
class Watch:
    """What was seen while a plugin's code ran: see :func:`watched`."""

    seconds: float = 0.0
    printed: str = ""
    changed: list[str] = field(factory=list)
    deprecated: list[str] = field(factory=list)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Runs a plugin's own code (its import, a registering hook) and takes back what it does to the rest of the process.

    What it prints goes to stderr, so that it cannot spoil ``--json``; torch's defaults, the working directory, the handler
    of Ctrl-C and the rest of :func:`settings` are put back. A deprecated hook is noted, since nobody would see a warning.
    """
    seen = Watch()
    caught: list[warnings.WarningMessage] = []
    started = time.perf_counter()
    try:
        with (
            undone() as seen.changed,
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(_Noted(seen)),
        ):
            warnings.simplefilter("always", HookDeprecated)
            yield seen
    finally:
        seen.seconds = time.perf_counter() - started
        for each in caught:
            if issubclass(each.category, HookDeprecated):
                seen.deprecated.append(str(each.message))
            else:  # not ours to judge
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextlib.contextmanager
def undone(before: Settings | None = None) -> Iterator[list[str]]:
    """Puts back what was changed for the whole process: torch's defaults, the working directory, the handler of Ctrl-C. What it
    was is in the list afterwards. ``before`` is what to go back to, where that is known (:func:`settings` takes some 50 µs)."""
    changed: list[str] = []
    before = settings() if before is None else before
    try:
        yield changed
    finally:
        for name, (after, _) in settings().items():
            value, restore = before[name]
            if after != value:
                restore(value)
                changed.append(f"{name} from {_told(value)} to {_told(after)}")


class _Noted(io.TextIOBase):
    """Stdout for a while: shown on stderr, and noted."""

    def __init__(self, seen: Watch) -> None:
        self.seen = seen

    def write(self, text: str) -> int:
        self.seen.printed += text
        return sys.stderr.write(text)


class HookDeprecated(DeprecationWarning):
    """The warning of a hook that will go: ``@hookspec(warn_on_impl=HookDeprecated("since 0.4; implement … instead"))``."""


def settings() -> Settings:
    """What a process has one of: the present value and how to set it."""
    found: Settings = {
        "torch's default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "torch's default device": (torch.get_default_device(), torch.set_default_device),
        "torch's number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "torch's gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "torch's deterministic mode": (torch.are_deterministic_algorithms_enabled(), torch.use_deterministic_algorithms),
        "torch's precision of float32 products": (
            torch.get_float32_matmul_precision(),
            torch.set_float32_matmul_precision,
        ),
        "the working directory": (_folder(), lambda old: os.chdir(old) if old else None),
        "sys.excepthook": (sys.excepthook, lambda old: setattr(sys, "excepthook", old)),
        "the level below which nothing is logged": (logging.root.manager.disable, logging.disable),
        **{name: (os.environ.get(name), functools.partial(_set_variable, name)) for name in VARIABLES},
    }
    if threading.current_thread() is threading.main_thread():
        found["the handler of Ctrl-C"] = (signal.getsignal(signal.SIGINT), lambda old: signal.signal(signal.SIGINT, old))
    return found


def _set_variable(name: str, old: str | None) -> None:
    if old is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = old


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # it may have been removed under us
        return os.getcwd()
    return None


def _told(value: Any) -> str:
    return str(getattr(value, "__name__", value))
