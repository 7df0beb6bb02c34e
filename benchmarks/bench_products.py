"""Count Gauss–Newton products to a residual of 1e-6 along an outer trajectory, for many solvers.

    python benchmarks/bench_products.py [--json FILE] [--dataset mnist] [--trajectories shipped slow
                                        followed] [--ridges 0.02] [--steps 16] [--solvers cg
                                        recycled-cg …]

Every solver gets the same systems: the lower loss of hyper-cleaning on all training rows at the
states (θ, x) of a method. ``shipped`` is `hg-ms` as registered, whose branches move far in every
outer step; ``slow`` is `hg-implicit` after 20 outer steps, with 20 lower steps at a rate of 1e-3.
Both draw a new lower state after ten outer steps, once within a trajectory. ``followed`` is
``slow`` without this. Ridge 0.02 is that of `hg-ms`. Figures exclude the first system of a
trajectory, which has no start. Products include sketches, checks and warm starts; only the seconds
include K-FAC's factors. The product is compiled and the loops are not, so solvers differ in no
other way; figures exclude compilation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from timing import difference, machine, quartiles, show, use_processors

from hgms.compiled import Programs
from hgms.contrib import KFAC, RecycledCG
from hgms.hypergradients import Implicit
from hgms.runs import RunConfig, calibrated, matrix_route
from hgms.solvers import CG, NystromCG
from hgms_core import (
    Branch,
    Key,
    LinearSolver,
    MatVec,
    Method,
    Outcome,
    Problem,
    Solution,
    State,
    Tree,
)

SOLVERS = [
    "cg",
    "warm",
    "nystrom",
    "recycled-cg",
    *(["kfac"] if importlib.util.find_spec("curvlinops") else []),
]
NEAR = 1.1e-6
"""In single precision, some solves stagnate just above the tolerance.

They count up to this residual.
"""
HEAD = ("solver", "trajectory", "ridge", "products", "quartiles", "/ cg", "seconds / cg")


def configured(dataset: str, **method: Any) -> tuple[Method, Problem]:
    task = {
        "name": "hyper-cleaning",
        "dataset": dataset,
        "corruption": 0.4,
        "validation_split": [0.75, 0.1, 0.15],
    }
    config = RunConfig.from_dict({"task": task, "method": method, "budget": "100 steps"})
    return config.method, config.task.problem(0, torch.device("cpu"), torch.float32)


def through(
    method: Method, problem: Problem, state: State, steps: int
) -> Iterator[tuple[State, Tree]]:
    """Yield the state after each step, and the θ of the step's hypergradient (its x is the new
    state's).
    """
    for _ in range(steps):
        theta = state["theta"]
        state, _ = method.step(problem, state, 0.0)
        yield state, theta


def trajectory(name: str, dataset: str, steps: int) -> tuple[Problem, list[tuple[Tree, Tree]]]:
    if name == "shipped":
        method, problem = configured(dataset, name="hg-ms")
        state = method.init(problem, 0)
    else:
        method, problem = configured(dataset, name="hg-implicit")
        *_, (state, _) = through(method, problem, method.init(problem, 0), 20)
        optimizer = {"lr": 1e-3, "schedule": None}
        slow: dict[str, Any] = {"optimizer": optimizer, "steps": 20}
        if name == "followed":
            slow["restart_every"] = None
        method, _ = configured(dataset, name="hg-implicit", generator=slow, outer={"lr": 0.1})
    return problem, [(theta, after["x"]) for after, theta in through(method, problem, state, steps)]


@frozen
class Plainly:
    """A solver that receives the product as a plain function, so its loop is Python like the
    others'.
    """

    solver: LinearSolver
    name: ClassVar[str] = "plainly"

    def solve(self, matvec: MatVec, b: torch.Tensor, x0: torch.Tensor | None = None) -> Solution:
        return self.solver.solve(lambda v: matvec(v), b, x0)


def estimators(ridge: float, names: list[str]) -> dict[str, Implicit]:
    limits: dict[str, Any] = {"ridge": ridge, "rtol": 1e-6, "max_steps": 1000}
    every = {
        "cg": ("cg", Implicit(operator="ggn", solver=Plainly(CG(**limits)))),
        "warm": (
            "cg, warm start",
            Implicit(operator="ggn", solver=Plainly(CG(**limits)), warm_start=True),
        ),
        "nystrom": (
            "nystrom, rank 20",
            Implicit(operator="ggn", solver=NystromCG(rank=20, **limits)),
        ),
        "recycled-cg": (
            "recycled-cg, rank 60",
            Implicit(operator="ggn", solver=RecycledCG(rank=60, **limits)),
        ),
        "kfac": ("kfac", Implicit(operator="ggn", solver=KFAC(**limits))),
    }
    return dict(every[name] for name in names)


def compare(
    name: str, dataset: str, ridge: float, steps: int, names: list[str]
) -> list[dict[str, Any]]:
    problem, states = trajectory(name, dataset, steps + 1)
    problem = evolve(problem, compiler=Programs())
    solvers = estimators(ridge, names)
    products: dict[str, list[int]] = {solver: [] for solver in solvers}
    seconds: dict[str, list[float]] = {solver: [] for solver in solvers}
    residuals: dict[str, list[float]] = {solver: [] for solver in solvers}
    memories = {solver: estimator.init(problem) for solver, estimator in solvers.items()}
    for theta, x in states:
        exact = None
        for solver, estimator in solvers.items():
            begin = time.process_time()
            estimate, memories[solver] = estimator.estimate(
                problem, theta, *Branch(x=x).as_candidates(), Key(0), memories[solver]
            )
            seconds[solver].append(time.process_time() - begin)
            products[solver].append(estimate.cost.products)
            exact = estimate.value["logits"] if exact is None else exact
            off = difference(estimate.value["logits"], exact)
            assert estimate.solution is not None
            residuals[solver].append(float(estimate.solution.residual))
            near = estimate.outcome is Outcome.STAGNATED and residuals[solver][-1] < NEAR
            assert estimate.outcome is Outcome.CONVERGED or near, (
                solver,
                estimate.outcome,
                residuals[solver][-1],
            )
            assert off < 1e-3, f"{solver} computes something else: relative difference {off:.1e}"
        print(name, {solver: counts[-1] for solver, counts in products.items()}, flush=True)
    return [
        {
            "what": solver,
            "trajectory": name,
            "dataset": dataset,
            "ridge": ridge,
            "each": products[solver],
            "products": quartiles([float(count) for count in products[solver][1:]]),
            "ratio": sum(products[solver][1:]) / sum(products["cg"][1:]),
            "seconds ratio": sum(seconds[solver][1:]) / sum(seconds["cg"][1:]),
            "largest residual": max(residuals[solver]),
        }
        for solver in solvers
    ]


def same_work(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a row: a new row replaces an older one."""
    return row["what"], row["trajectory"], row["dataset"], row["ridge"]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    counts = row["products"]
    spread = f"{counts['q25']:g}–{counts['q75']:g}"
    ratios = (f"{row[name]:.2f}" for name in ("ratio", "seconds ratio"))
    return (
        row["what"],
        row["trajectory"],
        f"{row['ridge']:g}",
        f"{counts['median']:g}",
        spread,
        *ratios,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="also write the figures to this file; what is not measured keeps its own",
    )
    parser.add_argument("--dataset", default="mnist", choices=["mnist", "digits"])
    parser.add_argument(
        "--trajectories",
        nargs="+",
        default=["shipped", "slow", "followed"],
        choices=["shipped", "slow", "followed"],
    )
    parser.add_argument("--ridges", nargs="+", type=float, default=[0.02])
    parser.add_argument(
        "--steps", type=int, default=16, help="systems of a trajectory after its first"
    )
    parser.add_argument(
        "--solvers", nargs="+", default=SOLVERS, choices=SOLVERS, help="cg is always among them"
    )
    options = parser.parse_args()
    names = [name for name in SOLVERS if name in {"cg", *options.solvers}]
    use_processors(1)
    figures: dict[str, Any] = {"products": []}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text(encoding="utf-8"))
    with matrix_route(calibrated(configured(options.dataset, name="hg-ms")[1]).route):
        for name in options.trajectories:
            for ridge in options.ridges:
                rows = compare(name, options.dataset, ridge, options.steps, names)
                show("Products to a relative residual of 1e-6", HEAD, [cells(row) for row in rows])
                kept = [
                    row
                    for row in figures["products"]
                    if same_work(row) not in {same_work(new) for new in rows}
                ]
                figures = {**machine(), "products": kept + rows}
                if options.json:
                    options.json.write_text(
                        json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
                    )


if __name__ == "__main__":
    main()
