"""Problems whose θ weighs the lower rows, each of which has a loss of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hgms.adapters import from_losses
from hgms_core import Problem, Rows, Tree
from support.helpers import F64, normal

Losses = Callable[[Tree, Tree], Tensor]
Loss = Callable[[Tree, Tree, Tree], Tensor]


def table(rows: int, seed: int, wrong: int = 0) -> Tree:
    """Rows of two classes, of which the first have the wrong label."""
    a = normal(rows, 3, seed=seed)
    y = torch.sign(a[:, 0] + 0.5 * a[:, 1])
    return {"a": a, "y": torch.where(torch.arange(rows) < wrong, -y, y)}


def weighing(losses: Losses, decay: Loss, lower: Any, upper: Any, **more: Any) -> Problem:
    """g is the mean of the losses, weighted by σ(θ), and the decay; f the mean of the losses."""

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        weights = theta["logits"][batch["index"]].sigmoid()
        return (weights * losses(x, batch)).mean() + decay(theta, x, batch)

    first = {"logits": torch.zeros(len(lower["y"]), dtype=F64)}
    return from_losses(
        g=g,
        f=lambda theta, x, batch: losses(x, batch).mean(),
        lower_data=lower,
        upper_data=upper,
        extensions=(Rows(losses=losses, regulariser=decay),),
        **{"theta0": first, **more},
    )
