"""Measure the cost of each executor: 1,000 short runs by two workers, every tenth worker killed.

    OMP_NUM_THREADS=1 python benchmarks/bench_executors.py [--runs 1000] [--every 10] [--executors
    local,ray] [--json FILE]

Task and method are those of tests/support/grid_plugin.py: 12 outer steps with a checkpoint after
each. The overhead of a run is the total time, times two workers, minus the wall seconds of the runs
(for a killed run those after the kill). It includes the start of a worker after a kill. The
processor time of this process, which assigns the runs and reads their results, limits the number of
busy workers. All folders must equal the folders of one process without kills, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from hgms.comparison.grid_file import load
from hgms.comparison.run_grid import run_grid
from hgms.executors import executor_of
from hgms.plugins import Host, Registry

PLUGIN = Path(__file__).resolve().parents[1] / "tests" / "support" / "grid_plugin.py"
WORKERS = 2


def grid(out: Path, runs: int, **method: Any) -> Any:
    settings = {"out": str(out), "threads": 1, "checkpoint_seconds": 0.0}
    table = {
        "budget": "12 steps",
        "seeds": runs,
        "task": "bowl",
        "method": [{"name": "walk", **method}],
        "run": settings,
    }
    return load(table, registry=Registry.load([PLUGIN]))


def steps(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.rglob("steps.jsonl")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument(
        "--every", type=int, default=10, help="kill the worker of every so manyth run; 0: of none"
    )
    parser.add_argument("--executors", default="local,ray")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as place:
        alone = run_grid(grid(Path(place) / "alone", arguments.runs), jobs=0, progress=False)
        assert alone.complete
        expected = steps(Path(place) / "alone")
        for name in arguments.executors.split(","):
            out = Path(place) / name
            marks = Path(place) / f"marks-{name}"
            marks.mkdir()
            kills = {
                "breaks": "kill",
                "at": 5,
                "seed": arguments.every,
                "every": True,
                "once": str(marks),
            }
            kills = kills if arguments.every else {}
            executor = executor_of(name, {"jobs": WORKERS}, Host.load())
            began = time.perf_counter()
            spent = time.process_time()
            comparison = run_grid(
                grid(out, arguments.runs, **kills), executor=executor, progress=False
            )
            took = time.perf_counter() - began
            here = time.process_time() - spent
            losses = len(list(marks.iterdir()))
            own = [
                json.loads(path.read_text())["wall_seconds"] for path in out.rglob("resources.json")
            ]
            figures.append(
                {
                    "executor": name,
                    "runs": arguments.runs,
                    "killed": losses,
                    "complete": comparison.complete,
                    "equal": steps(out) == expected,
                    "seconds": round(took, 1),
                    "run_ms": round(1e3 * sum(own) / len(own), 1),
                    "overhead_ms": round(1e3 * (WORKERS * took - sum(own)) / arguments.runs, 1),
                    "coordinator_ms": round(1e3 * here / arguments.runs, 2),
                }
            )
            print(figures[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
