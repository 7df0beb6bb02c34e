"""What the field's methods are measured on: a penalty with a known best value."""

from __future__ import annotations

from typing import Any

import torch
from scipy.optimize import brentq

from hgms.tasks.quadratic import Quadratic
from hgms_core import Method, Pipeline, Problem, Record, Tree
from support.helpers import F64

CPU = torch.device("cpu")


def pipeline(
    generator: Any, selector: Any, hypergradient: Any, outer: Any, **options: Any
) -> Pipeline:
    return Pipeline(
        generator=generator, selector=selector, hypergradient=hypergradient, outer=outer, **options
    )


def run(method: Method, problem: Problem, steps: int, seed: int = 0) -> tuple[Tree, Tree, Record]:
    state = method.init(problem, seed)
    record = {}
    for step in range(steps):
        state, record = method.step(problem, state, step / steps)
    return *method.result(state), record


def tuned_penalty() -> tuple[Problem, Any, float]:
    """Ridge regression with one penalty: the problem, its closed form, and the best log-penalty
    by bracketing ∇F = 0.
    """
    task = Quadratic(
        rows=12, validation_rows=40, features=4, condition=3.0, noise=2.0, penalty="shared"
    )
    problem = task.problem(0, CPU, F64)
    exact = task.closed_form(0, CPU, F64)
    slope = lambda t: float(  # noqa: E731
        exact.hypergradient({"log_penalty": torch.tensor([t], dtype=F64)})["log_penalty"]
    )
    return problem, exact, brentq(slope, -3.0, 2.0)
