"""One outer step on a GPU in the paper's setting: N = 8 branches of 20 steps on 256 rows, CG of 30 products on all 5,000 rows.

    python benchmarks/bench_gpu.py [--json FILE] [--seconds 5] [--device cuda] [--only outer stacking profile]

The paper completes 312 outer updates of hyper-cleaning in 60 s on an H100. Variants differ in how work reaches the device, and
in the precision of matrix products where a name says TF32: branches looped or stacked, kernels launched one by one or recorded
(``cuda_graphs``), and ``straight down``, the same step as one writes it by hand. Parts of a step are timed with the device
awaited between them, so they add up to a little more than the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from bench_pipeline import cleaning, show, straight_down  # which puts tests/ on the path
from helpers import moved

from hgms_branches import Branches
from hgms_core import Key, Pipeline, Problem, State
from hgms_hypergradients import Implicit
from hgms_outer import Adam
from hgms_selectors import BestOfN
from hgms_solvers import CG

COUNT, STEPS, BATCH, PRODUCTS, ROWS = 8, 20, 256, 30, 5000  # the paper, appendix on hyper-cleaning


def method(mode: str, cuda_graphs: bool, optimizer: str = "sgd") -> Pipeline:
    return Pipeline(
        generator=Branches(
            count=COUNT, steps=STEPS, lr=0.1, optimizer=optimizer, batch_size=BATCH, mode=mode, cuda_graphs=cuda_graphs
        ),
        selector=BestOfN(mode=mode),
        # A tolerance that is not reached: every solve makes all products.
        hypergradient=Implicit(solver=CG(ridge=1.0, rtol=1e-12, max_steps=PRODUCTS), cuda_graphs=cuda_graphs),
        outer=Adam(lr=0.1),
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, float]:
    """The median and the fastest of as many calls as fit into ``seconds``, after three that warm up."""
    for _ in range(3):
        call()
    wait(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        call()
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), min(times)


def parts(problem: Problem, pipeline: Pipeline, state: State, device: torch.device, seconds: float) -> dict[str, float]:
    from hgms_core import Branch

    key, theta = Key(0).fold("step", 1), problem.theta0
    start = state["start"]
    candidates = pipeline.generator.propose(problem, theta, start, key)
    selection = pipeline.selector.select(problem, theta, candidates, key)
    branch = Branch(x=candidates.at(selection.index))
    estimate, memory = pipeline.hypergradient.estimate(problem, theta, branch, key, state["hypergradient"])
    calls: dict[str, Callable[[], Any]] = {
        "propose [ms]": lambda: pipeline.generator.propose(problem, theta, start, key),
        "select [ms]": lambda: pipeline.selector.select(problem, theta, candidates, key),
        "differentiate [ms]": lambda: pipeline.hypergradient.estimate(problem, theta, branch, key, memory),
        "update [ms]": lambda: pipeline.outer.step(theta, estimate.value, state["outer"], 0.0),
    }
    return {name: milliseconds(call, device, seconds / 4)[0] for name, call in calls.items()}


def compare_outer_step(device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    problem = moved(cleaning((784, 300, 10), rows=ROWS), device)
    variants: dict[str, tuple[str, bool, str, str]] = {
        "looped": ("loop", False, "sgd", "highest"),
        "stacked": ("stacked", False, "sgd", "highest"),
        "recorded": ("stacked", True, "sgd", "highest"),
        "recorded, TF32": ("stacked", True, "sgd", "high"),
        "recorded, AdamW": ("stacked", True, "adamw", "highest"),
    }
    table: dict[str, dict[str, float]] = {}
    after: dict[str, Any] = {}
    for name, (mode, graphs, optimizer, precision) in variants.items():
        torch.set_float32_matmul_precision(precision)
        pipeline = method(mode, graphs, optimizer)
        state = pipeline.init(problem, seed=0)
        for _ in range(3):
            state, _ = pipeline.step(problem, state)
        if optimizer == "sgd":  # another optimiser ends elsewhere
            after[name] = state["theta"]["w"].double()
        median, fastest = milliseconds(lambda p=pipeline, s=state: p.step(problem, s), device, seconds)
        table[name] = {
            "step [ms]": median,
            "fastest [ms]": fastest,
            "updates in 60 s": 60e3 / median,
            **parts(problem, pipeline, state, device, seconds / 2),
        }
    reference = after["looped"]
    for name, theta in after.items():
        table[name]["θ differs by"] = float((theta - reference).norm() / reference.norm())
    torch.set_float32_matmul_precision("highest")
    key = Key(0).fold("step", 0)
    median, fastest = milliseconds(
        lambda: straight_down(problem, problem.theta0["w"], problem.x0, key, COUNT, PRODUCTS), device, seconds
    )
    table["straight down"] = {"step [ms]": median, "fastest [ms]": fastest, "updates in 60 s": 60e3 / median}
    return table


def compare_stacking(device: torch.device, seconds: float) -> dict[str, dict[str, float]]:
    """A lower step of 8 branches, each on its own batch: looped, stacked, recorded, at several sizes."""
    from bench_pipeline import SIZES

    table: dict[str, dict[str, float]] = {}
    for name, (sizes, batch_size) in SIZES.items():
        problem = moved(cleaning(sizes, rows=2000), device)
        row: dict[str, float] = {}
        for label, mode, graphs in (("loop", "loop", False), ("stacked", "stacked", False), ("recorded", "stacked", True)):
            branches = Branches(count=8, steps=10, lr=1e-3, batch_size=batch_size, mode=mode, cuda_graphs=graphs)
            start = branches.init(problem, Key(0))
            median, _ = milliseconds(
                lambda e=branches, s=start, p=problem: e.propose(p, p.theta0, s, Key(0)), device, seconds / 6
            )
            row[f"{label} [ms/step]"] = median / 10
        row["loop / stacked"] = row["loop [ms/step]"] / row["stacked [ms/step]"]
        row["stacked / recorded"] = row["stacked [ms/step]"] / row["recorded [ms/step]"]
        table[name] = row
    return table


def profile(device: torch.device) -> str:
    """Which kernels a recorded step spends its time in."""
    problem, pipeline = moved(cleaning((784, 300, 10), rows=ROWS), device), method("stacked", True)
    state = pipeline.init(problem, seed=0)
    for _ in range(3):
        state, _ = pipeline.step(problem, state)
    with torch.profiler.profile() as profiler:
        for _ in range(3):
            pipeline.step(problem, state)
        wait(device)
    sort = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=sort, row_limit=20, max_name_column_width=70)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--seconds", type=float, default=5, help="a variant is timed this long")
    parser.add_argument("--device", default="cuda")
    choices = ["outer", "stacking", "profile"]
    parser.add_argument("--only", choices=choices, nargs="+", default=choices[:2])
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    figures: dict[str, Any] = {"torch": torch.__version__, "device": name}
    print(f"{name}, torch {torch.__version__}")
    measured: Mapping[str, tuple[str, Callable[[], Mapping[str, object]]]] = {
        "outer": (
            f"One outer step, 784-300-10, n = {ROWS}: {COUNT} branches x {STEPS} steps x {BATCH} rows, {PRODUCTS} products",
            lambda: compare_outer_step(device, options.seconds),
        ),
        "stacking": ("One lower step of 8 branches", lambda: compare_stacking(device, options.seconds)),
    }
    for part in options.only:
        if part == "profile":
            print(profile(device))
            continue
        title, measure = measured[part]
        figures[part] = measure()
        show(title, figures[part])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
