"""Measure `hgms report` over 1,000 runs of 1,000 steps: seconds, peak memory and size of the page.

    python benchmarks/bench_report.py [--runs 1000] [--steps 1000] [--keep FOLDER] [--json FILE]

The runs are synthetic (four tasks, ten methods), in the format of the runner with every field. The
report is a separate process, timed from start to end. Required: under 20 s, 1 GB and 15 MB;
otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hgms.runs import RunFolder

LIMITS = {"seconds": 20.0, "processor_seconds": 20.0, "peak_memory_bytes": 1e9, "html_bytes": 15e6}
METHODS = (
    "hg-ms",
    "hg-baseline",
    "scalebio",
    "v-pbgd",
    "g-pbgd",
    "iaptt-gm",
    "soba",
    "stocbio",
    "random-search",
    "uniform",
)
TASKS = ("hyper-cleaning", "imbalanced-loss", "ridge-cv", "logistic-cv")
METRICS = {
    "test_accuracy": True,
    "train_accuracy": True,
    "memorised": False,
    "validation_loss": False,
    "cleaning_f1": True,
    "weight_clean": True,
    "weight_corrupted": False,
    "wrong_labels": False,
}
CONFIG = """schema = 1
seed = {seed}

[task]
name = "{task}"
dataset = "digits"
corruption = 0.6

[method]
name = "{method}"
reference = "none"
keep = "best"

[method.generator]
name = "branches"
count = {count}
steps = 20
optimizer = {{ name = "sgd", lr = {rate} }}

[method.hypergradient]
name = "implicit"

[method.hypergradient.solver]
name = "cg"
ridge = 0.02
rtol = 0.001

[budget]
outer_steps = {steps}

[run]
out = "runs"
device = "cpu"
dtype = "float32"
threads = 1
evaluate_every = 1
"""
ENVIRONMENT = {
    "python": "3.11",
    "platform": "Linux",
    "device": "cpu",
    "threads": 1,
    "versions": {"torch": "2.13.0", "hgms": "0.1.0"},
}


def rows(
    random_: random.Random, rank: int, steps: int
) -> tuple[list[str], list[str], dict[str, float], int]:
    """Return the lines of a run with its learning curve, clock, last metrics and oracle calls."""
    top = 0.95 - 0.02 * rank + random_.gauss(0, 0.008)
    pace = (20 + 6 * rank) * steps / 300
    count = 1 + rank % 4
    lines = []
    clock = []
    seconds = 0.0
    calls = 0
    metrics = {}
    for step in range(steps + 1):
        accuracy = top - (top - 0.1) * math.exp(-step / pace) + random_.gauss(0, 0.006)
        values = [
            accuracy,
            accuracy + 0.02,
            0.1 * math.exp(-step / pace),
            2.3 - 2 * accuracy,
            0.6 + 0.3 * accuracy,
            0.9,
            0.1,
            0.6,
        ]
        metrics = dict(zip(METRICS, values, strict=True))
        row: dict[str, Any] = {"step": step}
        if step:
            selected = min(int(random_.expovariate(1.0)), count - 1)
            calls += 40 + 5 * count
            row |= {
                "upper_loss": 2.4 - 2 * accuracy,
                "lower_loss": 1.1 - accuracy,
                "selected": selected,
                "gap": abs(random_.gauss(0, 0.02)),
                "scores": [2.1 - accuracy + 0.01 * k for k in range(count)],
                "finite_candidates": count,
                "hypergradient_norm": 0.01 + random_.random() / 100,
                "lower_gradient_norm": 0.03 * random_.random(),
                "update_norm": 10 * random_.random(),
                "residual": 0.2 * math.exp(-step / pace) * random_.random(),
                "iterations": 4,
                "curvature": 0.02 + random_.random() / 10,
                "stop_loss": 2.2 - 2 * accuracy,
                "outcome": "converged" if random_.random() < step / steps else "iteration-limit",
                "cost_lower_gradients": 40 * step,
                "cost_upper_values": 3 * step,
                "cost_upper_gradients": step,
                "cost_products": 4 * step,
                "cost_cross_products": step,
                "cost_rows": 14000 * step,
                "oracle_calls": calls,
            }
            seconds += 0.02 + 0.01 * random_.random()
        row |= {f"metric.{name}": value for name, value in metrics.items()}
        lines.append(json.dumps(row))
        clock.append(json.dumps({"step": step, "seconds": seconds}))
    return lines, clock, metrics, calls


def make(
    folder: Path,
    runs: int,
    steps: int,
    methods: tuple[str, ...] = METHODS,
    tasks: tuple[str, ...] = TASKS,
) -> int:
    """Create run folders below ``folder`` and return the written bytes.

    Tasks share the lines of a run, for speed.
    """
    written = 0
    seeds = -(-runs // (len(methods) * len(tasks)))
    for rank, method in enumerate(methods):
        for seed in range(seeds):
            lines, clock, metrics, calls = rows(random.Random(100 * rank + seed), rank, steps)
            for task in tasks:
                path = folder / task / f"{method}-{rank:08x}" / f"seed-{seed}"
                path.mkdir(parents=True)
                config = CONFIG.format(
                    seed=seed,
                    task=task,
                    method=method,
                    count=1 + rank % 4,
                    rate=0.01 * (1 + rank),
                    steps=steps,
                )
                summary = {
                    "status": "done",
                    "task": task,
                    "method": method,
                    "seed": seed,
                    "budget": f"{steps} outer steps",
                    "outer_steps": steps,
                    "upper_loss": 0.5,
                    "metrics": metrics,
                    "oracle_calls": calls,
                    "cost": {"lower_gradients": 40 * steps},
                }
                files = {
                    "config.toml": config,
                    "env.json": json.dumps(
                        {**ENVIRONMENT, "task": {"version": "1", "metrics": METRICS}}
                    ),
                    "steps.jsonl": "\n".join(lines) + "\n",
                    "timings.jsonl": "\n".join(clock) + "\n",
                    "resources.json": json.dumps({"peak_memory_bytes": (300 + 7 * rank) * 2**20}),
                }
                for name, text in files.items():
                    (path / name).write_text(text)
                    written += len(text)
                RunFolder(path).write_summary(summary)
                written += (path / "summary.json").stat().st_size
    return written


def measure(folder: Path, out: Path) -> dict[str, float]:
    """Run `hgms report` in a separate process: clock and processor seconds, and peak resident
    memory.
    """
    command = [sys.executable, "-m", "hgms", "report", str(folder), "--out", str(out)]
    started = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"hgms report failed with status {os.waitstatus_to_exitcode(status)}")
    scale = 1 if sys.platform == "darwin" else 1024
    busy = usage.ru_utime + usage.ru_stime
    return {
        "seconds": seconds,
        "processor_seconds": busy,
        "peak_memory_bytes": usage.ru_maxrss * scale,
        "html_bytes": out.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="make the runs and the page here, and leave them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        written = make(folder / "runs", options.runs, options.steps)
        print(f"{options.runs} runs of {options.steps} steps: {written / 1e6:.0f} MB")
        measured = measure(folder / "runs", folder / "report.html")
    for name, value in measured.items():
        factor, unit = (1.0, "s") if name.endswith("seconds") else (1e-6, "MB")
        shown = value * factor
        limit = LIMITS[name] * factor
        print(
            f"{name:20} {shown:8.1f} {unit:3} (limit {limit:.0f})  "
            f"{'ok' if value < LIMITS[name] else 'TOO MUCH'}"
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"runs": options.runs, "steps": options.steps, "bytes": written, **measured},
                indent=2,
            )
        )
    raise SystemExit(any(measured[name] >= limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    main()
