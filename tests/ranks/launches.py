"""A script as several ranks, which a test starts and waits for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def on_ranks(script: str, count: int, *arguments: str | Path, seconds: float = 300) -> None:
    """``script RANK COUNT ADDRESS arguments…`` in ``count`` processes, all of which must end
    well. None outlives the call.
    """
    address = f"tcp://{free_address()}"
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / script, str(rank), str(count), address, *arguments],
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},  # of `support`
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        ends = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * count, ends


def children_of(module: str) -> list[psutil.Process]:
    """The other ranks of this process."""
    return [child for child in psutil.Process().children() if module in child.cmdline()]
