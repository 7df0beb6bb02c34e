"""Compare two backward passes through an unrolled run: the graph of its path, and mixed mode.

    python benchmarks/bench_unrolling.py [--json FILE] [--repetitions 1] [--threads 1]

A run of K AdamW steps on 5,000 weighted images, then the derivative of the validation loss in the
weights. Memory is the peak of the tensors of run and derivative, in lower states |x|; times are
medians, in processor seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_pipeline import cleaning

from hgms.generators.branches import Branches
from hgms.hypergradients import Unrolled
from hgms.optim import AdamW
from hgms_core import Estimate, Key, Problem

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.helpers import LiveMemory

NETWORKS: dict[str, tuple[tuple[int, int, int], int]] = {
    "784-300-10, 256 rows": ((784, 300, 10), 256),
    "784-300-10, 2,048 rows": ((784, 300, 10), 2048),
}
LENGTHS = (5, 20)
WAYS = ("graph", "mixed")


def hypergradient(problem: Problem, steps: int, rows: int, backward: Any) -> Estimate:
    generator = Branches(
        count=1,
        steps=steps,
        optimizer=AdamW(lr=1e-3),
        batch_size=rows,
        keep_path="graph" if backward == "graph" else "states",
    )
    candidates = generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(0))
    return Unrolled().estimate(
        problem, problem.theta0, *candidates.branch(torch.tensor(0)).as_candidates(), Key(0), {}
    )[0]


def processor(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(repetitions: int) -> dict[str, dict[str, dict[str, float]]]:
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, (widths, rows) in NETWORKS.items():
        problem = cleaning(widths, rows=5000)
        size = sum(leaf.nbytes for leaf in problem.x0.values())
        figures[name] = {}
        for steps in LENGTHS:
            cell: dict[str, float] = {}
            values = {}
            for way in WAYS:
                with LiveMemory() as memory:
                    values[way] = hypergradient(problem, steps, rows, way).value["w"]
                cell[f"{way}, memory [|x|]"] = memory.peak / size
            error = (values["mixed"] - values["graph"]).norm() / values["graph"].norm()
            for way in WAYS:
                seconds = [
                    processor(partial(hypergradient, problem, steps, rows, way))
                    for _ in range(repetitions)
                ]
                cell[f"{way} [processor s]"] = statistics.median(seconds)
            cell["difference"] = float(error)
            figures[name][f"K = {steps}"] = cell
            print(
                f"{name}, K = {steps}: "
                + ", ".join(f"{key} {value:.4g}" for key, value in cell.items()),
                flush=True,
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
        "unrolled": measure(options.repetitions),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
