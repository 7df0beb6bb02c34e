"""``batches = "fresh"``: every product and the mixed term use another lower batch."""

from __future__ import annotations

from typing import Any

import torch
from support.helpers import F64, normal
from torch import Tensor

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.solvers import Neumann
from hgms_core import ROLES, Data, Key, Problem


def test_every_product_uses_another_batch() -> None:
    seen: list[tuple[int, ...]] = []

    def g(theta: Any, x: Any, batch: Any) -> Tensor:
        seen.append(tuple(batch["index"].tolist()))
        return ((batch["a"] @ x["w"] - theta["t"]) ** 2).mean()

    rows = Data.of({"a": normal(64, 3)})
    problem = Problem(
        theta0={"t": torch.zeros((), dtype=F64)},
        x0={"w": torch.zeros(3, dtype=F64)},
        g=g,
        f=lambda theta, x, batch: (x["w"] - 1).square().sum(),
        lower_data=rows,
        upper_data=dict.fromkeys(ROLES, rows),
    )
    branches = Branches(count=1, steps=1, lr=0.1)
    state = branches.init(problem, Key(0))
    branch = branches.propose(problem, problem.theta0, state, Key(1)).branch(torch.tensor(0))
    seen.clear()
    solver = Neumann(lr=0.1, steps=4)
    estimator = Implicit(solver=solver, batches="fresh", batch_size=6)
    estimator.estimate(problem, problem.theta0, branch, Key(2), None)
    assert len(set(seen)) >= 5  # four products and the mixed term
