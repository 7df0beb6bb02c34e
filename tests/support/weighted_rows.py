"""Six weighted rows of a least-squares problem, a pipeline for it, and calls that change both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hgms.adapters import from_losses, hypergradient
from hgms.config import Budget
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.runs import run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Pipeline, Problem

A = torch.linspace(-1, 1, 12).reshape(6, 2)
Y = torch.tensor([0.0, 1, 0, 1, 1, 0])
MODULE = nn.Linear(2, 1)


def g(theta: Any, x: Any, batch: Any) -> Any:
    losses = (batch["a"] @ x["w"] - batch["y"]).square()
    return (theta["t"][batch["index"]].sigmoid() * losses).mean() + 0.1 * x["w"].square().sum()


def f(theta: Any, x: Any, batch: Any) -> Any:
    return (batch["a"] @ x["w"] - batch["y"]).square().mean()


def problem(**changes: Any) -> Problem:
    parts: dict[str, Any] = {
        "theta0": {"t": torch.zeros(6)},
        "x0": {"w": torch.zeros(2)},
        "g": g,
        "f": f,
        "lower_data": {"a": A, "y": Y},
        "upper_data": {"a": A, "y": Y},
    }
    return from_losses(
        **{name: value for name, value in {**parts, **changes}.items() if value is not ...}
    )


def pipeline(**changes: Any) -> Pipeline:
    parts: dict[str, Any] = {
        "generator": Branches(count=2, steps=3, optimizer=SGD(lr=0.1)),
        "selector": BestOfN(),
        "hypergradient": Implicit(solver=CG(ridge=0.1)),
        "outer": Adam(lr=0.1),
    }
    return Pipeline(
        **{name: value for name, value in {**parts, **changes}.items() if value is not ...}
    )


def h(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "f": lambda theta, x: (x - 1).square().sum(),
        "g": lambda theta, x: (x - theta).square().sum(),
        "theta": torch.ones(2),
        "x": torch.zeros(2),
        "solver": CG(),
    }
    return hypergradient(**{**parts, **changes})


def started(**changes: Any) -> Any:
    """A run of one step, which tries the losses first."""
    return run(pipeline(), problem(**changes), Budget(outer_steps=1))


def by_hand(**changes: Any) -> Any:
    """The first step of a pipeline in a loop of one's own."""
    made = problem(**changes)
    method = pipeline(hypergradient=Unrolled())
    return method.step(made, method.init(made, 0))
