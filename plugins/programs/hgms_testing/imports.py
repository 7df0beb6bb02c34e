"""What importing a module does to the process it is imported into, seen from an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WATCH = """
import importlib, importlib.util, contextlib, io, json, os, random, socket, sys, threading, time
modules, paths, folder = json.loads(sys.argv[1])
sys.path[:] = sorted(paths, key=lambda path: path == folder)  # last: a random.py there is not the standard library's
import numpy, torch
import hgms_core
from hgms_core.sandbox import watched
sys.path[:] = paths
touched = []
def refuse(what):
    def inner(*_, **__):
        touched.append(what)
        raise OSError(f"no {what} while a plugin is imported")
    return inner
socket.socket.connect = refuse("network")
socket.getaddrinfo = refuse("network")
torch.cuda._lazy_init = refuse("CUDA")
def state():
    return repr((random.getstate(), [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
                 torch.get_rng_state().tolist()))
reports = []
for name, file in modules:
    touched.clear()
    before, out, error, began = state(), io.StringIO(), "", time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), watched() as seen:
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
    reports.append({
        "touched": sorted(set(touched)), "random": state() != before, "printed": out.getvalue()[:200], "error": error,
        "changed": seen.changed, "seconds": time.perf_counter() - began,
    })
print(json.dumps(reports))
"""

_seen: dict[tuple[str, str], dict[str, object]] = {}
_waiting: set[tuple[str, str]] = set()


def announce(module: str) -> tuple[str, str]:
    """The module will be asked about: all that are announced are imported in one interpreter, because it takes seconds to
    start."""
    where = module, str(getattr(sys.modules.get(module), "__file__", "") or "")
    if where not in _seen:
        _waiting.add(where)
    return where


def observed(module: str) -> dict[str, object]:
    """What importing ``module`` touched (network, CUDA), drew, printed and raised, and how long it took."""
    where = announce(module)
    if where not in _seen:
        modules = sorted(_waiting)
        folder = str(Path.cwd())
        request = json.dumps([modules, [folder if entry == "" else entry for entry in sys.path], folder])
        done = subprocess.run([sys.executable, "-P", "-c", WATCH, request], capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"the interpreter that imports {module} ended with {done.returncode}: {done.stderr}")
        _seen.update(zip(modules, json.loads(done.stdout.splitlines()[-1]), strict=True))
        _waiting.clear()
    return _seen[where]
