"""Measure how long results of 1,000, 10,000 and 100,000 finished runs take to read, step by step.

    OMP_NUM_THREADS=1 python benchmarks/bench_scan.py [--runs 1000,10000,100000] [--steps
    find,scan,…] [--json FILE]

The grid has four tasks and 25 methods, so 100 pairs. Seed 0 of each pair is executed (twelve
steps). The other seeds are copies of its folder with their seed, other metrics and a new checksum
in ``summary.json``. 100,000 folders are 800,000 files and 4 GB. Steps, each in a separate process:

* ``find``: the run folders below a directory.
* ``scan``: also reads every result: ``hgms.results.scan``, the first step of ``hgms report``.
* ``table``: after a scan, means, intervals and paired differences of each task.
* ``report``: the computations of ``hgms report`` before drawing (including rows of every run).
* ``compare``: `hgms compare` on a finished grid: load, find remaining runs, gather, tables.
* ``plan``: the remaining runs of the grid.

``scan`` and ``compare`` also have a cold figure: the kernel drops the cached contents of the files
(``posix_fadvise``), not their names. Required: 100,000 results within 60 s on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "support" / "grid_plugin.py"
TASKS = 4
METHODS = 25
LIMIT = 60.0
STEPS = ("find", "scan", "table", "report", "compare", "plan")
COLD = ("scan", "compare")


def grid(out: Path, seeds: int) -> Any:
    from hgms.comparison.grid_file import load
    from hgms.plugins import Registry

    table = {
        "budget": "12 steps",
        "seeds": seeds,
        "run": {"out": str(out), "threads": 1},
        "task": [
            {"name": "bowl", "label": f"bowl-{rows}", "rows": rows} for rows in range(5, 5 + TASKS)
        ],
        "method": [
            {"name": "walk", "label": f"walk-{k:02}", "noise": 0.01 * (1 + k)}
            for k in range(METHODS)
        ],
    }
    return load(table, registry=Registry.load([PLUGIN]))


def make(out: Path, runs: int) -> int:
    """Create folders of this number of runs and return the number of seeds.

    Existing folders stay.
    """
    from hgms.comparison.run_grid import run_grid
    from hgms.runs import RunFolder

    seeds = max(1, runs // (TASKS * METHODS))
    if not run_grid(grid(out, 1), jobs=0, progress=False).complete:
        raise SystemExit("a run of the first seed has failed")
    for first in sorted(out.glob("*/*/seed-0")):
        files = {
            path.name: path.read_bytes()
            for path in first.iterdir()
            if not path.name.startswith(".")
        }
        config = files.pop("config.toml").decode()
        summary = json.loads(files.pop("summary.json"))
        del files["manifest.json"]
        for seed in range(1, seeds):
            folder = first.with_name(f"seed-{seed}")
            if folder.exists():
                continue
            folder.mkdir()
            noise = random.Random(seed)
            metrics = {
                name: value + noise.gauss(0, 0.1) for name, value in summary["metrics"].items()
            }
            text = config.replace("\nseed = 0\n", f"\nseed = {seed}\n", 1)
            for name, data in {**files, "config.toml": text.encode()}.items():
                with open(folder / name, "wb", buffering=0) as stream:
                    stream.write(data)
            RunFolder(folder).write_summary({**summary, "seed": seed, "metrics": metrics})
    return seeds


def forget(out: Path) -> None:
    """Advise the kernel to drop the contents of the files."""
    os.sync()
    for folder, _, names in os.walk(out):
        for name in names:
            handle = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure(step: str, out: Path, seeds: int) -> dict[str, float]:
    """Return clock and processor seconds of one step without imports, and the peak resident
    memory.
    """
    import hgms.report.compute as report
    from hgms.comparison.run_grid import run_grid
    from hgms.results import scan, table
    from hgms.results.folders import _run_folders

    parts: dict[str, float] = {}
    started = time.perf_counter()
    spent = time.process_time()

    def lap(name: str) -> None:
        parts[name] = time.perf_counter() - started - sum(parts.values())

    runs = TASKS * METHODS * seeds
    if step == "find":
        assert len(dict(_run_folders(out))) == runs
    elif step in ("scan", "table"):
        found, skipped = scan(out)
        assert len(found) == runs
        assert not skipped
        if step == "table":
            started = time.perf_counter()
            spent = time.process_time()
            by_task: dict[str, dict[str, list[Any]]] = {}
            for run in found:
                by_task.setdefault(run.task_label, {}).setdefault(run.label, []).append(run)
            for task, by_method in by_task.items():
                table(by_method, "distance", "walk-00", task=task, higher_is_better=False)
    elif step == "report":
        assert len(report.build([out]).runs) == runs
    else:
        loaded = grid(out, seeds)
        lap("load")
        if step == "plan":
            cells = loaded.cells()
            lap("cells")
            assert not [cell for cell in cells if cell.state()[0] in ("new", "begun")]
            lap("states")
        else:
            assert len(run_grid(loaded, jobs=0, progress=False).runs) == runs
            lap("run")
    taken = {
        "seconds": time.perf_counter() - started,
        "processor_seconds": time.process_time() - spent,
    }
    return {
        **taken,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        **parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default="1000,10000,100000")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--warm", action="store_true", help="leave the cold figures out")
    parser.add_argument("--keep", type=Path, help="make the folders here, and leave them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("STEP", "SEEDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], options.keep, int(options.one[1]))))
        return
    figures = []
    place = Path(options.keep or tempfile.mkdtemp(prefix="hgms-scan-"))
    try:
        for runs in map(int, options.runs.split(",")):
            out = place / str(runs)
            began = time.perf_counter()
            seeds = make(out, runs)
            print(f"{runs:,} runs, made in {time.perf_counter() - began:.0f} s", flush=True)
            for step in options.steps.split(","):
                for cold in (True, False) if step in COLD and not options.warm else (False,):
                    if cold:
                        forget(out)
                    command = [
                        sys.executable,
                        __file__,
                        "--keep",
                        str(out),
                        "--one",
                        step,
                        str(seeds),
                    ]
                    told = subprocess.run(
                        command, check=True, stdout=subprocess.PIPE, text=True
                    ).stdout
                    figure = {
                        "runs": runs,
                        "step": step,
                        "cold": cold,
                        **json.loads(told.splitlines()[-1]),
                    }
                    figures.append(figure)
                    parts = ", ".join(
                        f"{key} {figure[key]:.2f}"
                        for key in ("load", "cells", "states", "run")
                        if key in figure
                    )
                    took = (
                        f"{figure['seconds']:8.2f} s, {figure['processor_seconds']:8.2f} s of "
                        "processor"
                    )
                    memory = f"{figure['peak_bytes'] / 1e6:6.0f} MB"
                    print(
                        (
                            f"  {step:8} {'cold' if cold else 'warm'} {took}, "
                            f"{memory}{'; ' * bool(parts)}{parts}"
                        ),
                        flush=True,
                    )
    finally:
        if options.keep is None:
            shutil.rmtree(place)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    slow = [
        figure
        for figure in figures
        if figure["step"] in ("scan", "compare") and figure["seconds"] > LIMIT
    ]
    raise SystemExit(bool(slow))


if __name__ == "__main__":
    main()
