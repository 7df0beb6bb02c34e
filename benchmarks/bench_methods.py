"""Compare one outer step of every method with the same step by hand in PyTorch.

    python benchmarks/bench_methods.py [--json FILE] [--only v-pbgd scalebio ...] [--pairs 31]
    [--seconds 0.3] [--dataset mnist]

The task is hyper-cleaning on MNIST (784-300-10, 5,000 training images) if $HGMS_DATA/mnist contains
it, else on scikit-learn's digits, whose small network shows the overhead of the pipeline. A pair is
one block of steps per side, in random order; the clock is the processor time of this process (less
affected by other programs than wall time), with one thread and garbage collection only between
blocks. Compare the ratio (median over the pairs, with quartiles), not the milliseconds. First, both
sides make two steps on whole batches and must agree.

To add a method, write its stepper for this problem into reference_steps.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from reference_steps import METHODS, Stepper, Straight

from hgms.runs import RunConfig
from hgms_core import Method, Pipeline, Problem, Tree

COLUMNS = ("pipeline [ms]", "straight down [ms]", "ratio", "q25", "q75", "overhead [µs]")


def composed(name: str) -> Method:
    """Return a registered method with its default settings."""
    method = RunConfig.from_dict(
        {"task": "hyper-cleaning", "method": name, "budget": "1 steps"}
    ).method
    if not isinstance(innermost(method), Pipeline):
        raise SystemExit(f"{name} is not a pipeline")
    return method


def innermost(method: Any) -> Any:
    """Return the pipeline inside the wrappers of a method."""
    return innermost(method.method) if hasattr(method, "method") else method


def whole(method: Any) -> Any:
    """Return the same method on whole batches."""
    if hasattr(method, "method"):
        return evolve(method, method=whole(method.method))

    def unbatched(part: Any) -> Any:
        return evolve(
            part,
            **{name: None for name in ("batch_size", "upper_batch_size") if hasattr(part, name)},
        )

    return evolve(
        method, generator=unbatched(method.generator), hypergradient=unbatched(method.hypergradient)
    )


def through(problem: Problem, method: Method) -> Stepper:
    """Return the pipeline as a stepper."""
    state = method.init(problem, seed=0)

    def step() -> tuple[Tree, Tree]:
        nonlocal state
        state, _ = method.step(problem, state)
        return state["theta"], state["x"]

    return step


def agree(problem: Problem, method: Method, straight: Straight) -> None:
    """Check that two steps on whole batches give the same (θ, x)."""
    ours = through(problem, whole(method))
    other = straight(problem, innermost(whole(method)))
    for _ in range(2):
        trees = ours()
        expected = other()
    for mine, theirs in zip(trees, expected, strict=True):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name].detach(), rtol=1e-3, atol=1e-5)


def block(step: Stepper, steps: int) -> float:
    """Return the processor seconds of one step."""
    gc.collect()
    gc.disable()
    begin = time.process_time()
    for _ in range(steps):
        step()
    spent = time.process_time() - begin
    gc.enable()
    return spent / steps


def measure(
    problem: Problem, method: Method, straight: Straight, pairs: int, seconds: float
) -> dict[str, float]:
    sides = (through(problem, method), straight(problem, innermost(method)))
    for side in sides:
        block(side, 1)  # allocators and kernels warm up
    steps = max(1, round(seconds / block(sides[1], 1)))
    order = random.Random(0)
    measured = []
    for _ in range(pairs):
        spent = [0.0, 0.0]
        for side in order.sample((0, 1), 2):
            spent[side] = block(sides[side], steps)
        measured.append(spent)
    q25, ratio, q75 = statistics.quantiles([ours / theirs for ours, theirs in measured], n=4)
    more = statistics.median(ours - theirs for ours, theirs in measured)
    ours, theirs = (statistics.median(side) for side in zip(*measured, strict=True))
    return dict(zip(COLUMNS, (1e3 * ours, 1e3 * theirs, ratio, q25, q75, 1e6 * more), strict=True))


def cleaning(dataset: str) -> Problem:
    task = {"name": "hyper-cleaning", "dataset": dataset, "corruption": 0.6}
    task_object = RunConfig.from_dict(
        {"task": task, "method": "scalebio", "budget": "1 steps"}
    ).task
    return task_object.problem(0, torch.device("cpu"), torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=list(METHODS), nargs="+", default=list(METHODS))
    root = os.environ.get("HGMS_DATA")
    usual = "mnist" if root and (Path(root) / "mnist").exists() else "digits"
    parser.add_argument("--dataset", choices=["mnist", "digits"], default=usual)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=0.3, help="processor time of a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = cleaning(options.dataset)
    small = cleaning("digits")
    machine = platform.processor() or platform.machine()
    figures: dict[str, Any] = {
        "dataset": options.dataset,
        "torch": torch.__version__,
        "machine": machine,
    }
    print(
        f"hyper-cleaning on {options.dataset}, one thread, {options.pairs} pairs of blocks of "
        f"{options.seconds} s\n"
    )
    print("| method | " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * len(COLUMNS))
    for name in options.only:
        method = composed(name)
        agree(small, method, METHODS[name])
        figures[name] = measure(problem, method, METHODS[name], options.pairs, options.seconds)
        digits = (2, 2, 3, 3, 3, 0)
        cells = [
            f"{value:.{places}f}"
            for value, places in zip(figures[name].values(), digits, strict=True)
        ]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
