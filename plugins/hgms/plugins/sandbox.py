"""Run the code of a plugin without side effects on the process.

Process-wide settings that a plugin changes are restored. Its printed output goes to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import define, field

Settings = dict[str, tuple[Any, Callable[[Any], Any]]]
"""Process-wide settings by name: the value, and the function that sets it."""

_OWN = ("HGMS_DATA", "HGMS_PLUGINS", "HGMS_DISABLE_PLUGINS", "HGMS_STRICT_PLUGINS")
VARIABLES = (*_OWN, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""The environment variables that HGMS and torch read."""


@define
class Watch:
    """The effects of a plugin's code while it ran (see :func:`watch_plugin`)."""

    seconds: float = 0.0
    changed: list[str] = field(factory=list)


@contextlib.contextmanager
def watch_plugin() -> Iterator[Watch]:
    """Run a plugin's code in this context: its import, or a registering hook.

    - Printed output goes to stderr, so that the output of ``--json`` stays valid.
    - Changed :func:`settings` are restored. On exit, ``changed`` describes each change.
    """
    watch = Watch()
    before = settings()
    started = time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield watch
    finally:
        watch.seconds = time.perf_counter() - started
        for name, (after, _) in settings().items():
            value, restore = before[name]
            if after != value:
                restore(value)
                old, new = (
                    item.__name__ if inspect.isroutine(item) else item for item in (value, after)
                )
                watch.changed.append(f"{name} from {old} to {new}")


def settings() -> Settings:
    """Return the current values and the functions that set them; takes about 50 µs."""
    values: Settings = {
        "torch's default dtype": (torch.get_default_dtype(), torch.set_default_dtype),
        "torch's default device": (torch.get_default_device(), torch.set_default_device),
        "torch's number of threads": (torch.get_num_threads(), torch.set_num_threads),
        "torch's gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        "torch's deterministic mode": (
            torch.are_deterministic_algorithms_enabled(),
            torch.use_deterministic_algorithms,
        ),
        "torch's precision of float32 products": (
            torch.get_float32_matmul_precision(),
            torch.set_float32_matmul_precision,
        ),
        "the working directory": (_folder(), lambda old: os.chdir(old) if old else None),
        "sys.excepthook": (sys.excepthook, lambda old: setattr(sys, "excepthook", old)),
        "the level below which nothing is logged": (logging.root.manager.disable, logging.disable),
        **{
            name: (os.environ.get(name), functools.partial(_set_variable, name))
            for name in VARIABLES
        },
    }
    if threading.current_thread() is threading.main_thread():
        values["the handler of Ctrl-C"] = (
            signal.getsignal(signal.SIGINT),
            lambda old: signal.signal(signal.SIGINT, old),
        )
    return values


def _set_variable(name: str, old: str | None) -> None:
    if old is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = old


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # the folder may have been removed
        return os.getcwd()
    return None
