"""Side effects of importing a module, observed in a separate interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hgms.facts import module_file

PATIENCE = 300
"""Seconds allowed for all imports of one request."""

WATCH = """
import importlib, importlib.util, contextlib, io, json, os, random, socket, sys, time
modules, paths, folder = json.load(sys.stdin)
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
sys.path[:] = paths
importlib.invalidate_caches()
print(json.dumps([report(*module) for module in modules]), file=replies, flush=True)
os._exit(0)
"""

_seen: dict[tuple[str, str], dict[str, object]] = {}
_waiting: set[tuple[str, str]] = set()


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
        folder = str(Path.cwd())
        paths = [folder if entry == "" else entry for entry in sys.path]
        done = subprocess.run(
            [sys.executable, "-P", "-c", WATCH],
            input=json.dumps([modules, paths, folder]),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if not done.stdout:  # the module may have ended it; the others are not to blame
            _waiting.discard(where)
            raise RuntimeError(
                f"the interpreter that imports {module} ended with {done.returncode}: {done.stderr}"
            )
        _seen.update(zip(modules, json.loads(done.stdout), strict=True))
        _waiting.clear()
    return _seen[where]
