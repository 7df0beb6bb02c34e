"""What LESS compares: the directions of single rows' gradients; of training rows, those of the steps Adam would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Data, Loss, Tree, gradient, groups
from hgms_less.projection import Projector


@frozen(kw_only=True)
class Preconditioner:
    """The step that Adam would take for one row's gradient, up to the learning rate and without bias correction::

        Γ(g) = m′ / √(v′ + ε),     m′ = β1 m + (1 − β1) g,     v′ = β2 v + (1 − β2) g²

    with ε inside the root, or outside: m′ / (√v′ + ε). The moments m and v are those of a checkpoint and stay as they are.

    >>> step = Preconditioner(betas=(0.9, 0.99), eps=1e-8, eps_placement="inside")
    >>> step([torch.tensor([[1.0]])], [torch.tensor([0.0])], [torch.tensor([0.0])])    # 0.1 · 1 / √(0.01 · 1)
    [tensor([[1.0000]])]
    """

    betas: tuple[float, float]
    eps: float
    eps_placement: Literal["inside", "outside"]

    def __call__(self, grads: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
        beta1, beta2 = self.betas
        steps = []
        for g, first, second in zip(grads, m, v, strict=True):
            root = (beta2 * second).addcmul(g, g, value=1 - beta2)
            root = (root + self.eps).sqrt_() if self.eps_placement == "inside" else root.sqrt_().add_(self.eps)
            steps.append((beta1 * first).add(g, alpha=1 - beta1).div_(root))
        return steps


def row_gradients(loss: Loss, theta: Tree, x: Tree, data: Data, index: Tensor) -> tuple[list[Tensor], Tensor, Tree]:
    """∇_x of the loss of each row alone as leaves ``[B, ...]``, these losses, ``[B]``, and the batch: one pass with a copy of x
    for each row.

    The copies are views, so only their gradients take memory: B lower states.
    """
    count = len(index)
    batch = {name: leaf for name, leaf in data.rows(index[:, None].to(data.device)).items() if leaf.shape[:1] == (count,)}
    stacked = {name: leaf.expand(count, *leaf.shape) for name, leaf in x.items()}
    (group,) = groups(loss, stacked, own_batch=True, mode="stacked")
    grads, losses = gradient(group.loss, theta, group.x, batch)
    return grads, losses, batch


def directions(grads: Sequence[Tensor], projector: Projector) -> Tensor:
    """The projections, ``[B, D]``, scaled to length 1; those of zero vectors stay zero."""
    return torch.nn.functional.normalize(projector.apply(grads), dim=1)
