"""Methods of the field against their equations on small problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.field_problems import pipeline
from support.helpers import F64, assert_same, counted, network_problem

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.outer import Sgd
from hgms.runs import RunConfig
from hgms.selectors import BestOfN
from hgms.solvers import FixedPoint
from hgms_core import Pipeline, Problem

PROBLEM = network_problem()


def method(name: str, **parts: Any) -> Pipeline:
    """The composition of that name, with some of its numbers changed."""
    table = {"task": "quadratic", "method": {"name": name, **parts}, "budget": "1 steps"}
    found = RunConfig.from_dict(table).method
    assert isinstance(found, Pipeline)
    return found


def scalar() -> Problem:
    """g = x² − θx + ½θ² (Hessian 2, mixed derivative −1, x* = θ/2) and f = ½(x − 3)² + θ, so F'
    = ½(x* − 3) + 1.
    """
    one = torch.ones(1, dtype=F64)
    return Problem(
        theta0={"t": 2 * one},
        x0={"x": 5 * one},
        g=lambda t, x, _: (x["x"].square() - t["t"] * x["x"] + 0.5 * t["t"].square()).sum(),
        f=lambda t, x, _: (0.5 * (x["x"] - 3).square() + t["t"]).sum(),
    )


SGD = {"name": "sgd", "lr": 0.1}


LOWER = {"steps": 2, "lr": 0.25}  # x − ¼(2x − θ) = x/2 + θ/4


def test_stocbio_by_hand() -> None:
    # Three terms at x = 2: v = ¼(b + ½b + ¼b) with b = −1.
    solver = {"name": "neumann", "lr": 0.25, "steps": 3}
    made = method("stocbio", generator=LOWER, hypergradient={"solver": solver}, outer=SGD)
    state, _ = made.step(scalar(), made.init(scalar(), 0))
    assert float(state["theta"]["t"]) == pytest.approx(2 - 0.1 * (1 - 7 / 16))


def test_the_rows_of_a_step_by_differences_are_those_that_went_through() -> None:
    problem, seen = counted(PROBLEM)
    made = method(
        "darts", generator={"batch_size": 5}, hypergradient={"batch_size": 6, "upper_batch_size": 7}
    )
    state = made.init(problem, 0)
    for _ in range(2):
        state, record = made.step(problem, state)
    assert record["cost_rows"] == seen["f_rows"] + seen["g_rows"]


def test_fresh_batches_of_everything_are_one_batch() -> None:
    one, fresh = (
        pipeline(
            Branches(count=1, steps=2),
            BestOfN(),
            Implicit(solver=FixedPoint(lr=0.3, max_steps=3), batches=how),
            Sgd(),
        )
        for how in ("one", "fresh")
    )
    results = [each.step(PROBLEM, each.init(PROBLEM, 0))[0]["theta"] for each in (one, fresh)]
    assert_same(*results)
