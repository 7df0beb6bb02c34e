"""Leases per second on a disk: acquired and released, checked, renewed, and rejected.

    OMP_NUM_THREADS=1 python benchmarks/bench_leases.py [--runs 2000] [--folder FOLDER] [--json
    FILE]

A lease is a file ``.lease`` in a run's folder (hgms/store/lease.py). One process, and then
two processes in separate folders, measure ``claim`` (acquire a lease in a new folder and release
it), ``ensure`` (the check before each write) and ``renew`` (touch the file, as the holder does
every twenty seconds). Then ``rejected``: two processes acquire leases in the same folders, and the
second is rejected. The output contains wall-clock and processor time.

The result applies to the disk of ``--folder``. A network file system is slower: run it there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from hgms.store import FolderInUse, hold_lease

NAMES = ("claim", "ensure", "renew", "rejected")


def timed(out: dict[str, list[float]], name: str, began: float, spent: float, count: int) -> None:
    out[name] = [
        1e6 * (time.perf_counter() - began) / count,
        1e6 * (time.process_time() - spent) / count,
    ]


def work(place: Path, number: int, runs: int, together: Barrier) -> dict[str, list[float]]:
    """Microseconds by the clock and on the processor of each thing, of one process."""
    out: dict[str, list[float]] = {}
    folders = [place / f"own-{number}" / f"seed-{seed}" for seed in range(runs)]
    together.wait()
    began = time.perf_counter()
    spent = time.process_time()
    for folder in folders:
        with hold_lease(folder):
            pass
    timed(out, "claim", began, spent, runs)
    with hold_lease(folders[0]) as lease:
        together.wait()
        began = time.perf_counter()
        spent = time.process_time()
        for _ in range(runs):
            lease.ensure()
        timed(out, "ensure", began, spent, runs)
        together.wait()
        began = time.perf_counter()
        spent = time.process_time()
        for _ in range(runs):
            os.utime(lease.path)
        timed(out, "renew", began, spent, runs)
    shared = [place / "shared" / f"seed-{seed}" for seed in range(runs)]
    with contextlib.ExitStack() as held:
        if number == 0:
            for folder in shared[: runs // 10]:
                held.enter_context(hold_lease(folder))
        together.wait()
        if number == 1:
            began = time.perf_counter()
            spent = time.process_time()
            for folder in shared[: runs // 10]:
                with contextlib.suppress(FolderInUse), hold_lease(folder):
                    raise AssertionError("two hold one folder")
            timed(out, "rejected", began, spent, runs // 10)
        together.wait()
    return out


def _work(place: Path, number: int, runs: int, together: Barrier, told: Any) -> None:
    told.put(work(place, number, runs, together))


def measure(folder: Path | None, processes: int, runs: int) -> list[dict[str, list[float]]]:
    context = multiprocessing.get_context("fork")
    together = context.Barrier(processes)
    told = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        workers = [
            context.Process(target=_work, args=(Path(place), k, runs, together, told))
            for k in range(processes)
        ]
        for worker in workers:
            worker.start()
        figures = [told.get() for _ in workers]
        for worker in workers:
            worker.join()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument(
        "--folder", type=Path, help="where to claim; by default the folder for temporary files"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for processes in (1, 2):
        told = measure(options.folder, processes, options.runs)
        for name in NAMES:
            clock, processor = zip(
                *([figure[name] for figure in told if name in figure] or [(0.0, 0.0)]), strict=True
            )
            if not max(clock):
                continue
            figure = {
                "what": name,
                "processes": processes,
                "microseconds": max(clock),
                "processor_microseconds": max(processor),
                "a_second": len(clock) * 1e6 / max(clock),
            }
            figures.append(figure)
            print(
                f"{processes} process{'es' * (processes > 1)}, {name:8} "
                f"{figure['microseconds']:8.1f} µs each "
                f"({figure['processor_microseconds']:.1f} of processor), "
                f"{figure['a_second']:10,.0f} a second together",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
