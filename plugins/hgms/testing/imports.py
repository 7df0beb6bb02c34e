"""Side effects of importing a module, observed in a separate interpreter."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from hgms.facts import module_file

PATIENCE = 300
"""Seconds allowed for all imports of one request."""

# Importing torch takes seconds, so the interpreter starts once. On Linux each request runs in a
# fork, which does not see the effects of other modules. On other systems it serves one request.
WATCH = """
import importlib, importlib.util, contextlib, io, json, os, random, signal, socket, sys, threading
import time
paths, folder = json.loads(sys.argv[1])
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
# last: a random.py there is not the standard library's
sys.path[:] = sorted(paths, key=lambda path: path == folder)
import numpy, torch
import hgms_core
from hgms.plugins import watch_plugin
touched = []
def forbid(what):
    def inner(*_, **__):
        touched.append(what)
        raise OSError(f"no {what} while a plugin is imported")
    return inner
socket.socket.connect = forbid("network")
socket.getaddrinfo = forbid("network")
torch.cuda._lazy_init = forbid("CUDA")
def state():
    parts = numpy.random.get_state()
    numbers = [part.tolist() if hasattr(part, "tolist") else part for part in parts]
    return repr((random.getstate(), numbers, torch.get_rng_state().tolist()))
def report(name, file):
    touched.clear()
    before, out, error, began = state(), io.StringIO(), "", time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), watch_plugin() as seen:
        try:
            try:
                known = importlib.util.find_spec(name) is not None
            except (ImportError, ValueError, AttributeError):
                known = False
            if known:
                importlib.import_module(name)
            elif file:
                spec = importlib.util.spec_from_file_location(name, file)
                module = importlib.util.module_from_spec(spec)
                sys.modules[name] = module
                spec.loader.exec_module(module)
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
    return {
        "touched": sorted(set(touched)),
        "random": state() != before,
        "printed": out.getvalue()[:200],
        "error": error,
        "changed": seen.changed,
        "seconds": time.perf_counter() - began,
    }
for line in sys.stdin:
    modules, paths, folder, environment, patience = json.loads(line)
    child = os.fork() if sys.platform == "linux" else 0
    if child == 0:
        signal.alarm(patience)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = paths
        importlib.invalidate_caches()
        print(json.dumps([report(*module) for module in modules]), file=replies, flush=True)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        print(code, file=replies, flush=True)
"""

_seen: dict[tuple[str, str], dict[str, object]] = {}
_waiting: set[tuple[str, str]] = set()
_started: dict[int, Interpreter] = {}
"""The interpreter per process id: a forked process starts a separate interpreter."""


def announce(module: str) -> tuple[str, str]:
    """Register a module for observation: all registered modules are imported in one request."""
    where = module, module_file(module) or ""
    if where not in _seen:
        _waiting.add(where)
    return where


def observe(module: str) -> dict[str, object]:
    """Report the effects of importing ``module``.

    The report contains what the import accessed (network, CUDA), drew, printed and raised, and its
    duration.
    """
    where = announce(module)
    if where not in _seen:
        modules = sorted(_waiting)
        if os.getpid() not in _started:
            _started[os.getpid()] = Interpreter()
            atexit.register(_end)
        reply = _started[os.getpid()].request(modules)
        if not isinstance(reply, list) or sys.platform != "linux":  # it ended, or cannot fork
            _end()
        if not isinstance(reply, list):
            _waiting.discard(
                where
            )  # it may have ended the interpreter; the others are not to blame
            raise RuntimeError(f"the interpreter that imports {module} ended with {reply}")
        _seen.update(zip(modules, reply, strict=True))
        _waiting.clear()
    return _seen[where]


class Interpreter:
    """A process that has imported torch and imports modules on request, one list at a time."""

    def __init__(self) -> None:
        folder = str(Path.cwd())
        command = [sys.executable, "-P", "-c", WATCH, json.dumps([_paths(folder), folder])]
        # Open as long as the process lives.
        self._wrote: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._wrote, text=True
        )

    def request(self, modules: list[tuple[str, str]]) -> list[dict[str, object]] | str:
        """Return a report per module.

        If the importing process ended, return its exit code and output instead.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        start = self._wrote.seek(0, os.SEEK_END)
        folder = str(Path.cwd())
        request = json.dumps([modules, _paths(folder), folder, dict(os.environ), PATIENCE])
        with contextlib.suppress(BrokenPipeError):
            print(request, file=self._process.stdin, flush=True)
        reply = json.loads(self._process.stdout.readline() or "null")
        if isinstance(reply, list):
            return reply
        code = self._process.wait() if reply is None else reply
        self._wrote.seek(start if reply else 0)
        return f"{code}: {self._wrote.read()}"

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)
        self._wrote.close()


def _paths(folder: str) -> list[str]:
    return [folder if entry == "" else entry for entry in sys.path]


def _end() -> None:
    if interpreter := _started.pop(os.getpid(), None):
        interpreter.close()
