"""Measure the resources of a run: peak memory of the process and its GPU, wall time and processor
time, written to ``resources.json``.
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

from hgms.runs import RunFolder, counting, device_called
from hgms.store import DiskError, FolderInUse, json_object, replace_file
from hgms_core import ConfigError
from hgms_core.errors import CheckpointError


@define
class Usage:
    """Whether the measurement belongs to a run that was executed in this process.

    ``ours`` is false if another process finished the run in the meantime.
    """

    ours: bool = True


@contextlib.contextmanager
def measure_usage(path: Path, device: str) -> Iterator[Usage]:
    """Measure a run and write ``resources.json``.

    The file contains the peak memory of this process during the run (libraries included) and on its
    GPU. It also contains the wall and processor time (including evaluation, writing and building
    the problem). An interrupted run adds to the stored values. Its processor time is null, since
    the time of a killed process is unknown.
    """
    gc.collect()
    _reset_peak()
    began = time.monotonic()
    spent = counting(broken_off=RunFolder(path).has_begun)
    cuda = cuda_for(device)
    if cuda is not None:
        cuda.empty_cache()
        cuda.init()  # needed before a device with a number is used
        cuda.reset_peak_memory_stats(device)
    usage = Usage()
    try:
        yield usage
    except FolderInUse:  # the stored file belongs to the process that has the folder
        usage.ours = False
        raise
    finally:
        stored: dict[str, Any] = {}
        with contextlib.suppress(CheckpointError):
            stored = json_object(path / "resources.json")
        before = {key: value for key, value in stored.items() if isinstance(value, int | float)}
        gpu = cuda.max_memory_allocated(device) if cuda is not None else None
        now = {
            "peak_memory_bytes": max(peak_memory(), before.get("peak_memory_bytes") or 0),
            "peak_gpu_memory_bytes": max(gpu, before.get("peak_gpu_memory_bytes") or 0)
            if gpu is not None
            else None,
            "wall_seconds": time.monotonic() - began + (before.get("wall_seconds") or 0.0),
            "processor_seconds": spent(),
            "threads": torch.get_num_threads(),
        }
        if usage.ours and path.is_dir():
            with contextlib.suppress(DiskError):  # a run does not fail for its resource file
                replace_file(path / "resources.json", json.dumps(now, indent=2).encode())


def cuda_for(device: str) -> Any:
    """Return torch.cuda for a run on a GPU. A run on the CPU must not allocate GPU memory."""
    with contextlib.suppress(ConfigError):  # the run itself reports this error
        return torch.cuda if device_called(device).type == "cuda" else None
    return None


def _reset_peak() -> None:
    """Reset the kernel's high-water mark, if that is possible; else it covers the whole process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the highest resident memory in bytes since :func:`_reset_peak`, or since the process
    started if the mark cannot be reset.
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
