"""A branch of a cross-fit is not trained on the lower rows that it judges."""

from __future__ import annotations

import torch
from support.helpers import F64, normal
from torch import Tensor

from hgms.hypergradients import Implicit
from hgms.methods.crossfit import CrossFit
from hgms.methods.crossfit.folds import Folds
from hgms.outer import Sgd
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import ROLES, Data, Key, Problem, Rows, Tree

SIZE = 24
A = normal(SIZE, 3)


def losses(x: Tree, batch: Tree) -> Tensor:
    return (batch["a"] @ x["w"] - 1).square()


def test_a_branch_trains_on_the_other_folds() -> None:
    drawn: list[Tensor] = []

    def rows(index: Tensor) -> Tree:
        drawn.append(index.clone())
        return {"a": A[index]}

    problem = Problem(
        theta0={"logits": torch.zeros(SIZE, dtype=F64)},
        x0={"w": torch.zeros(3, dtype=F64)},
        g=lambda t, x, b: (t["logits"][b["index"]].sigmoid() * losses(x, b)).mean(),
        f=lambda t, x, b: losses(x, b).mean(),
        lower_data=Data(SIZE, rows=rows),
        upper_data=dict.fromkeys(ROLES, Data.of({"a": normal(30, 3, seed=1)})),
        rows=Rows(losses=losses),
    )
    method = CrossFit(
        hypergradient=Implicit(solver=CG(ridge=1e-3)),
        outer=Sgd(lr=0.5),
        selector=BestOfN(),
        count=3,
        warmup=5,
        lr=0.05,
        batch_size=6,
    )
    state = method.init(problem, 0)
    folds = Folds.drawn(problem, 3, Key(0).fold("folds"))
    drawn.clear()
    method.step(problem, state)
    for branch in range(3):
        trained_on = torch.cat(drawn[5 * branch : 5 * (branch + 1)])
        assert len(trained_on) == 30
        assert not (folds.lower[trained_on] == branch).any()
