"""Measure one outer step on a GPU in the paper's setting.

    python benchmarks/bench_gpu.py [--json FILE] [--seconds 5] [--device cuda] [--only outer
            stacking compiled products profile]
    python benchmarks/bench_gpu.py --device cpu --quick
            only to test the script: small sizes, on a CPU

The setting has N = 8 branches of 20 steps on 256 rows, and CG of 30 products on all 5,000 rows. The
paper completes 312 outer updates of hyper-cleaning in 60 s on an H100. Variants differ in the
launch of work, and in the precision of matrix products (TF32 in a name): branches looped or
stacked, kernels launched one by one or compiled (``run.compile``), and ``straight down``, the same
step by hand. The device is awaited between timed parts, so they add up to slightly more than the
step.

``compiled`` is the method ``hg-ms`` as registered on data of the size of digits and of MNIST, eager
and compiled (``run.compile``), each on both routes of matrix products (``run.matmul``);
``products`` is the same for one Hessian product and one solve. Compilation time is a separate
column.
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
from attrs import evolve
from bench_pipeline import SIZES, cleaning, show, straight_down  # which puts tests/ on the path
from support.helpers import moved

from hgms.compiled import Levels, Programs, linearized
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.optim import SGD, AdamW
from hgms.outer import Adam
from hgms.runs import RunConfig, matrix_route
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Key, Linearization, Pipeline, Problem, State

# the paper, appendix on hyper-cleaning
COUNT = 8
STEPS = 20
BATCH = 256
PRODUCTS = 30
ROWS = 5000

DATA = {"digits": ((64, 32, 10), 600), "MNIST": ((784, 300, 10), ROWS)}
"""Layers and rows: learnable labels of random images, so no files are necessary."""
QUICK = {"digits": ((16, 8, 10), 40)}
FORMS = {"eager": False, "compiled": True}
"""By name: whether steps are compiled."""


def method(mode: str, optimizer: str = "sgd") -> Pipeline:
    return Pipeline(
        generator=Branches(
            count=COUNT,
            steps=STEPS,
            optimizer=(SGD if optimizer == "sgd" else AdamW)(lr=0.1),
            batch_size=BATCH,
            mode=mode,
        ),
        selector=BestOfN(mode=mode),
        # A tolerance that no solve reaches: every solve makes all products.
        hypergradient=Implicit(solver=CG(ridge=1.0, rtol=1e-12, max_steps=PRODUCTS)),
        outer=Adam(lr=0.1),
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(
    call: Callable[[], Any], device: torch.device, seconds: float
) -> tuple[float, float]:
    """Return the median and the minimum of the calls within ``seconds``, after three warm-up
    calls; of one call for 0.
    """
    least = 3 if seconds else 1
    for _ in range(least):
        call()
    wait(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < least:
        begin = time.perf_counter()
        call()
        wait(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), min(times)


def parts(
    problem: Problem, pipeline: Pipeline, state: State, device: torch.device, seconds: float
) -> dict[str, float]:
    from hgms_core import Branch

    key = Key(0).fold("step", 1)
    theta = problem.theta0
    start = state["start"]
    candidates = pipeline.generator.propose(problem, theta, start, key)
    selection = pipeline.selector.select(problem, theta, candidates, key)
    branch = Branch(x=candidates.at(selection.index))
    estimate, memory = pipeline.hypergradient.estimate(
        problem, theta, *branch.as_candidates(), key, state["hypergradient"]
    )
    calls: dict[str, Callable[[], Any]] = {
        "propose [ms]": lambda: pipeline.generator.propose(problem, theta, start, key),
        "select [ms]": lambda: pipeline.selector.select(problem, theta, candidates, key),
        "differentiate [ms]": lambda: pipeline.hypergradient.estimate(
            problem, theta, *branch.as_candidates(), key, memory
        ),
        "update [ms]": lambda: pipeline.outer.step(theta, estimate.value, state["outer"], 0.0),
    }
    return {name: milliseconds(call, device, seconds / 4)[0] for name, call in calls.items()}


def compare_outer_step(
    device: torch.device,
    seconds: float,
    layers: tuple[int, int, int] = (784, 300, 10),
    rows: int = ROWS,
) -> dict[str, dict[str, float]]:
    plain = moved(cleaning(layers, rows=rows), device)
    variants: dict[str, tuple[str, bool, str, str]] = {
        "looped": ("loop", False, "sgd", "highest"),
        "stacked": ("stacked", False, "sgd", "highest"),
        "compiled": ("stacked", True, "sgd", "highest"),
        "compiled, TF32": ("stacked", True, "sgd", "high"),
        "compiled, AdamW": ("stacked", True, "adamw", "highest"),
    }
    table: dict[str, dict[str, float]] = {}
    after: dict[str, Any] = {}
    for name, (mode, compiled, optimizer, precision) in variants.items():
        torch.set_float32_matmul_precision(precision)
        problem = evolve(plain, compiler=Programs() if compiled else None)
        pipeline = method(mode, optimizer)
        state = pipeline.init(problem, seed=0)
        for _ in range(3):
            state, _ = pipeline.step(problem, state)
        if optimizer == "sgd":  # another optimiser ends elsewhere
            after[name] = state["theta"]["w"].double()
        median, fastest = milliseconds(
            lambda p=pipeline, q=problem, s=state: p.step(q, s), device, seconds
        )
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
        lambda: straight_down(plain, plain.theta0["w"], plain.x0, key, COUNT, PRODUCTS),
        device,
        seconds,
    )
    table["straight down"] = {
        "step [ms]": median,
        "fastest [ms]": fastest,
        "updates in 60 s": 60e3 / median,
    }
    return table


def compare_stacking(
    device: torch.device, seconds: float, several: Mapping[str, Any] = SIZES
) -> dict[str, dict[str, float]]:
    """Compare a lower step of 8 branches with separate batches: looped, stacked, compiled, at
    several sizes.
    """
    table: dict[str, dict[str, float]] = {}
    for name, (sizes, batch_size) in several.items():
        plain = moved(cleaning(sizes, rows=2000), device)
        row: dict[str, float] = {}
        for label, mode, compiled in (
            ("loop", "loop", False),
            ("stacked", "stacked", False),
            ("compiled", "stacked", True),
        ):
            problem = evolve(plain, compiler=Programs() if compiled else None)
            branches = Branches(
                count=8, steps=10, optimizer=SGD(lr=1e-3), batch_size=batch_size, mode=mode
            )
            start = branches.init(problem, Key(0))
            median, _ = milliseconds(
                lambda e=branches, s=start, p=problem: e.propose(p, p.theta0, s, Key(0)),
                device,
                seconds / 6,
            )
            row[f"{label} [ms/step]"] = median / 10
        row["loop / stacked"] = row["loop [ms/step]"] / row["stacked [ms/step]"]
        row["stacked / compiled"] = row["stacked [ms/step]"] / row["compiled [ms/step]"]
        table[name] = row
    return table


def hg_ms() -> Any:
    table = {"task": "hyper-cleaning", "method": "hg-ms", "budget": "1 steps"}
    return RunConfig.from_dict(table).method


def compare_compiled(
    device: torch.device, seconds: float, sizes: Mapping[str, Any] = DATA
) -> dict[str, dict[str, Any]]:
    """Time an outer step of ``hg-ms``, after ten warm-up steps."""
    table: dict[str, dict[str, Any]] = {}
    for size, (layers, rows) in sizes.items():
        problem = moved(cleaning(layers, rows=rows), device)
        reference = None
        for route in ("exact", "fast"):
            for name, compiled in FORMS.items():
                programs = Programs() if compiled else None
                chosen = evolve(problem, compiler=programs)
                pipeline = hg_ms()
                with matrix_route(route, device):
                    begin = time.perf_counter()
                    state, _ = pipeline.step(chosen, pipeline.init(chosen, 0))
                    wait(device)
                    first = time.perf_counter() - begin
                    for _ in range(2):
                        state, _ = pipeline.step(chosen, state)
                    theta = state["theta"]["w"].double()
                    median, fastest = milliseconds(
                        lambda p=pipeline, c=chosen, s=state: p.step(c, s), device, seconds
                    )
                reference = theta if reference is None else reference
                table[f"{size}, {name}, {route}"] = {
                    "step [ms]": median,
                    "fastest [ms]": fastest,
                    "first step [s]": first,
                    "making programs [s]": programs.seconds if programs else 0.0,
                    "eager all the same": sum(
                        how != "compiled" for how in programs.outcomes.values()
                    )
                    if programs
                    else "–",
                    "θ differs by": float((theta - reference).norm() / reference.norm()),
                }
    return table


def compare_products(
    device: torch.device, seconds: float, sizes: Mapping[str, Any] = DATA
) -> dict[str, dict[str, Any]]:
    """Time one Hessian product and one solve of 30 products, on all rows."""
    table: dict[str, dict[str, Any]] = {}
    for size, (layers, rows) in sizes.items():
        problem = moved(cleaning(layers, rows=rows), device)
        below = problem.lower_data.batch(None)
        above = problem.upper_data["differentiate"].batch(None)
        solver = CG(ridge=1.0, rtol=1e-12, max_steps=PRODUCTS)
        for route in ("exact", "fast"):
            with matrix_route(route, device):
                at = (problem.theta0, problem.x0)
                plain = Linearization.of(
                    lambda t, x, p=problem, b=above: p.f(t, x, b),
                    lambda t, x, p=problem, b=below: p.g(t, x, b),
                    *at,
                    "vjp",
                )
                compiled = linearized(
                    Programs(), (size, route), Levels(f=problem.f, g=problem.g), *at, below, above
                )
                forms: dict[str, Any] = {"eager": plain.matvec}
                if compiled is not None:
                    forms["compiled"] = compiled.matvec
                expected = plain.matvec(plain.rhs)
                for name, product in forms.items():
                    differs = float((product(plain.rhs) - expected).norm() / expected.norm())
                    one, _ = milliseconds(lambda h=product, v=plain.rhs: h(v), device, seconds / 2)
                    solve, _ = milliseconds(
                        lambda h=product, v=plain.rhs, s=solver: s.solve(h, v), device, seconds / 2
                    )
                    table[f"{size}, {name}, {route}"] = {
                        "product [ms]": one,
                        "solve [ms]": solve,
                        "differs by": differs,
                    }
    return table


def profile(
    device: torch.device, layers: tuple[int, int, int] = (784, 300, 10), rows: int = ROWS
) -> str:
    """Print the kernels that take most of a compiled step."""
    problem = evolve(moved(cleaning(layers, rows=rows), device), compiler=Programs())
    pipeline = method("stacked")
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--seconds", type=float, default=5, help="a variant is timed this long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and a few calls: tries the script, measures nothing",
    )
    choices = ["outer", "stacking", "compiled", "products", "profile"]
    parser.add_argument("--only", choices=choices, nargs="+", default=choices[:-1])
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    seconds = 0.0 if options.quick else options.seconds
    sizes = QUICK if options.quick else DATA
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    figures: dict[str, Any] = {"torch": torch.__version__, "device": name}
    print(f"{name}, torch {torch.__version__}")
    (layers, rows), stacks = (
        sizes["digits" if options.quick else "MNIST"],
        {"quick": ((16, 8, 10), 8)} if options.quick else SIZES,
    )
    measured: Mapping[str, tuple[str, Callable[[], Mapping[str, object]]]] = {
        "outer": (
            f"One outer step, {'-'.join(map(str, layers))}, n = {rows}: "
            f"{COUNT} branches x {STEPS} steps x {BATCH} rows, {PRODUCTS} products",
            lambda: compare_outer_step(device, seconds, layers, rows),
        ),
        "stacking": (
            "One lower step of 8 branches",
            lambda: compare_stacking(device, seconds, stacks),
        ),
        "compiled": ("One outer step of hg-ms", lambda: compare_compiled(device, seconds, sizes)),
        "products": (
            f"One Hessian product, and a solve of {PRODUCTS}",
            lambda: compare_products(device, seconds, sizes),
        ),
    }
    for part in options.only:
        if part == "profile":
            print(profile(device, layers, rows))
            continue
        title, measure = measured[part]
        figures[part] = measure()
        show(title, figures[part])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
