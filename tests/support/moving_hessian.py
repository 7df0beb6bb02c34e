"""A lower level whose Hessian moves with θ, for solvers that remember from one step to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hgms.hypergradients import Implicit
from hgms.runs.checkpoint import load_state, save_state
from hgms_core import Branch, Estimate, Problem, State, Tree
from support.helpers import F64, KEY, assert_same, normal

SIZE = 12
SCALE = torch.logspace(-2, 1, SIZE, dtype=F64)


def curved(theta: Tree, x: Tree, batch: Tree) -> Any:
    return (SCALE * x["x"] ** 2 / 2 + x["x"] ** 4 / 12).sum() - theta["t"] @ x["x"]


def value(theta: Tree, x: Tree, batch: Tree) -> Any:
    return ((x["x"] - 1) ** 2).sum() / 2


PROBLEM = Problem(
    theta0={"t": normal(SIZE, seed=9)}, x0={"x": torch.zeros(SIZE, dtype=F64)}, g=curved, f=value
)


def lower_solution(theta: Tree) -> Tree:
    """By Newton's method."""
    x = torch.zeros(SIZE, dtype=F64)
    for _ in range(60):
        x = x - (SCALE * x + x**3 / 3 - theta["t"]) / (SCALE + x**2)
    return {"x": x}


def upper_value(theta: Tree) -> Any:
    return value(theta, lower_solution(theta), {})


def theta_of(step: int) -> Tree:
    return {"t": PROBLEM.theta0["t"] + 1e-3 * min(step, 20)}


def estimates(estimator: Implicit, state: State, steps: range) -> tuple[list[Estimate], State]:
    found = []
    for step in steps:
        theta = theta_of(step)
        branch = Branch(x=lower_solution(theta))
        estimate, state = estimator.estimate(PROBLEM, theta, *branch.as_candidates(), KEY, state)
        found.append(estimate)
    return found, state


def check_resumes(estimator: Implicit, cuts: list[int], folder: Path) -> None:
    """From each of the cuts through a file, the estimates are those of the whole sequence."""
    last = max(cuts) + 2
    whole, end = estimates(estimator, estimator.init(PROBLEM), range(last))
    for cut in cuts:
        _, half = estimates(estimator, estimator.init(PROBLEM), range(cut))
        save_state(folder / "state.safetensors", half)
        rest, again = estimates(
            estimator, load_state(folder / "state.safetensors"), range(cut, last)
        )
        assert_same([each.value for each in rest], [each.value for each in whole[cut:]])
        assert_same(again, end)
