"""Features of LESS: directions of gradients of single rows; for training rows, of their Adam
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

import hgms_mix.lm
from hgms_core import Data, Loss, Problem, Sources, State, Tree, gradient, groups
from hgms_mix.lm import adamw_part
from hgms_mix.methods.less.projection import Projector


@frozen(kw_only=True)
class Preconditioner:
    """The step that Adam would take for one row's gradient, up to the learning rate and without
    bias correction::

        Γ(g) = m′ / √(v′ + ε),     m′ = β1 m + (1 − β1) g,     v′ = β2 v + (1 − β2) g²

    with ε inside the root, or outside: m′ / (√v′ + ε). The moments m and v are from a checkpoint
    and do not change.

    Examples
    --------
    >>> step = Preconditioner(betas=(0.9, 0.99), eps=1e-8, eps_placement="inside")
    >>> step(
    ...     [torch.tensor([[1.0]])], [torch.tensor([0.0])], [torch.tensor([0.0])]
    ... )  # 0.1 · 1 / √(0.01 · 1)
    [tensor([[1.0000]])]
    """

    betas: tuple[float, float]
    eps: float
    eps_placement: Literal["inside", "outside"]

    def __call__(
        self, grads: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = self.betas
        steps = []
        for g, first, second in zip(grads, m, v, strict=True):
            root = (beta2 * second).addcmul(g, g, value=1 - beta2)
            root = (
                (root + self.eps).sqrt_()
                if self.eps_placement == "inside"
                else root.sqrt_().add_(self.eps)
            )
            steps.append((beta1 * first).add(g, alpha=1 - beta1).div_(root))
        return steps


@frozen(kw_only=True)
class Features:
    """The directions of gradients of single rows at a state of the warm-up.

    They are projected and scaled to length 1; zero vectors stay zero.
    """

    gamma: Preconditioner
    projector: Projector | None

    def of_validation(
        self, problem: Problem, state: State, index: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of some validation rows, ``[B, D]``.

        Also the validation set of each row, and the mean loss of the rows.
        """
        grads, losses, batch = row_gradients(
            problem.f, problem, state, problem.upper_data["differentiate"], index, "validation"
        )
        return self._directions(grads), batch["source"].reshape(-1), losses.mean()

    def of_pool(self, problem: Problem, state: State, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of the Adam steps of some rows of the pool, and their mean loss."""
        pooled = sources_of(problem).pooled
        grads, losses, _ = row_gradients(pooled, problem, state, problem.lower_data, index, "pool")
        m, v = (list(adamw_part(state["train"], part).values()) for part in "mv")
        return self._directions(self.gamma(grads, m, v)), losses.mean()

    def _directions(self, vectors: Sequence[Tensor]) -> Tensor:
        projected = (
            torch.cat([leaf.flatten(1) for leaf in vectors], dim=1)
            if self.projector is None
            else self.projector.apply(vectors)
        )
        return torch.nn.functional.normalize(projected, dim=1)


def sources_of(problem: Problem) -> Sources:
    return hgms_mix.lm.sources_of(problem, "method 'less' chooses among the rows of")


def row_gradients(
    loss: Loss, problem: Problem, state: State, data: Data, index: Tensor, role: str
) -> tuple[list[Tensor], Tensor, Tree]:
    """Return ∇_x of the loss of each row as leaves ``[B, ...]``, the losses ``[B]``, and the batch.

    One pass uses a copy of the state's x for each row. The copies are views, so only their
    gradients take memory: B lower states.

    Raises
    ------
    NumericalError
        If a loss is not finite; the message contains the ``role`` of the rows.
    """
    count = len(index)
    x = adamw_part(state["train"], "x")
    batch = {
        name: leaf
        for name, leaf in data.rows(index[:, None].to(data.device)).items()
        if leaf.shape[:1] == (count,)
    }
    stacked = {name: leaf.expand(count, *leaf.shape) for name, leaf in x.items()}
    (group,) = groups(loss, stacked, own_batch=True, mode="stacked")
    grads, losses = gradient(group.loss, problem.theta0, group.x, batch)
    hgms_mix.lm.check_finite(losses, f"the loss of a {role} row", state["step"] + 1)
    return grads, losses, batch
