"""What a run used: peak memory of the process and of its GPU, wall time and processor time, in
``resources.json``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import define

from hgms.config.tables import parse_json
from hgms.runs import (
    DiskError,
    FolderInUse,
    RunFolder,
    counting,
    device_called,
    read_file,
    replace_file,
)
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError


@define
class Usage:
    """Whether what was measured is of a run that was carried out here. One that another process
    has ended meanwhile is not.
    """

    ours: bool = True


@contextlib.contextmanager
def measured(path: Path, device: str) -> Iterator[Usage]:
    """Writes ``resources.json``: the peak memory of this process during the run (libraries
    included) and on its GPU, and the wall and processor time (with evaluation, writing and building
    the problem). A run that was broken off adds to what is there, but for the processor time: of
    that nobody knows what a killed process took, and it is null.
    """
    gc.collect()
    fresh = _reset_peak()
    began = time.monotonic()
    spent = counting(broken_off=RunFolder(path).begun)
    cuda = cuda_for(device)
    if cuda is not None:
        cuda.empty_cache()
        cuda.init()  # a device with a number is not looked at before
        cuda.reset_peak_memory_stats(device)
    usage = Usage()
    try:
        yield usage
    except FolderInUse:  # what is there is of whoever has the folder
        usage.ours = False
        raise
    finally:
        stored: Any = {}
        with contextlib.suppress(CheckpointError):
            stored = parse_json(read_file(path / "resources.json"), "resources.json")
        numbers = stored.items() if isinstance(stored, dict) else ()
        before = {key: value for key, value in numbers if isinstance(value, int | float)}
        gpu = cuda.max_memory_allocated(device) if cuda is not None else None
        now = {
            "peak_memory_bytes": max(_peak(), before.get("peak_memory_bytes") or 0),
            "peak_memory_is_of_this_run": fresh,
            "peak_gpu_memory_bytes": max(gpu, before.get("peak_gpu_memory_bytes") or 0)
            if gpu is not None
            else None,
            "wall_seconds": time.monotonic() - began + (before.get("wall_seconds") or 0.0),
            "processor_seconds": spent(),
            "threads": torch.get_num_threads(),
        }
        if usage.ours and path.is_dir():
            with contextlib.suppress(DiskError):  # what a run took is not worth failing it
                replace_file(path / "resources.json", json.dumps(now, indent=2).encode())


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, what is there already is not looked at when garbage is collected between two runs:
    of a notebook it is much.
    """
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def cuda_for(device: str) -> Any:
    """torch.cuda for a run on a GPU; a run on the CPU must not take a GPU's memory just for
    asking.
    """
    with contextlib.suppress(ConfigError):  # which the run itself tells
        return torch.cuda if device_called(device).type == "cuda" else None
    return None


def _reset_peak() -> bool:
    """Lets the kernel's high-water mark start again from here. False where it cannot: then it is
    the whole process's.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int:
    """The highest resident memory in bytes since :func:`_reset_peak`, or of the process where
    that is all there is.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
