"""Directions of gradients of single rows: Adam's steps, and random projections in blocks.

The whole matrix of a projection is never in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms_core import Data, Key, Loss, Problem, State, Tree, component, gradient, groups
from hgms_core.validators import positive

BLOCK = 2**23
"""Coordinates of a block times dimensions: a block has its own random numbers."""

REPEATS = 4
"""Non-zero entries in each row of the projection."""


def adam_steps(
    grads: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    eps_placement: Literal["inside", "outside"],
) -> list[Tensor]:
    """Return the step that Adam would take for each row's gradient, without bias correction::

        Γ(g) = m′ / √(v′ + ε),     m′ = β1 m + (1 − β1) g,     v′ = β2 v + (1 − β2) g²

    with ε inside the root, or outside: m′ / (√v′ + ε). The learning rate is excluded. The moments m
    and v are from a checkpoint and do not change.

    Examples
    --------
    >>> moments = [torch.tensor([0.0])], [torch.tensor([0.0])]
    >>> options = {"betas": (0.9, 0.99), "eps": 1e-8, "eps_placement": "inside"}
    >>> adam_steps([torch.tensor([[1.0]])], *moments, **options)  # 0.1 · 1 / √(0.01 · 1)
    [tensor([[1.0000]])]
    """
    beta1, beta2 = betas
    steps = []
    for g, first, second in zip(grads, m, v, strict=True):
        root = (beta2 * second).addcmul(g, g, value=1 - beta2)
        root = (root + eps).sqrt_() if eps_placement == "inside" else root.sqrt_().add_(eps)
        steps.append((beta1 * first).add(g, alpha=1 - beta1).div_(root))
    return steps


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
    x = hgms_mix.lm.adamw_part(state["train"], "x")
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


@final
@component
class GradientProjection:
    """Table ``projection`` of LESS: the random projection of gradients, x ↦ x R.

    R, ``[d, D]``, is random with E‖xR‖² = ‖x‖². The inner product of two vectors is preserved up to
    a standard deviation of at most √(2/D) times their lengths (Johnson and Lindenstrauss). Each row
    of R has four entries ±½ (Kane and Nelson 2014: 4d additions per vector). Vectors do not change
    if D ≥ d.

    Parameters
    ----------
    dims
        D.
    seed
        For another projection of the same run.

    Examples
    --------
    >>> rows = torch.randn(2, 3000, generator=Key(0).generator(), dtype=torch.float64)
    >>> short = GradientProjection(dims=2000).apply([rows], Key(1))
    >>> short.shape, bool(((short.norm(dim=1) / rows.norm(dim=1)) - 1).abs().max() < 0.1)
    (torch.Size([2, 2000]), True)
    """

    dims: int = field(default=8192, validator=positive)
    seed: int = 0

    def apply(self, leaves: Sequence[Tensor], key: Key) -> Tensor:
        """Return the projections ``[B, D]`` of B vectors given in pieces ``[B, ...]``.

        R depends only on ``key``, ``seed``, D, the shapes and the kind of device.
        """
        flat = [leaf.flatten(1) for leaf in leaves]
        if sum(piece.shape[1] for piece in flat) <= self.dims:
            return torch.cat(flat, dim=1)
        out = flat[0].new_zeros(flat[0].shape[0], self.dims)
        blocks = key.fold("projection", self.seed)
        for number, piece in enumerate(flat):
            for block, part in enumerate(torch.split(piece, max(1, BLOCK // self.dims), dim=1)):
                _scatter(out, part, blocks.fold("block", number, block).generator(part.device))
        return out / REPEATS**0.5


def _scatter(out: Tensor, part: Tensor, generator: torch.Generator) -> None:
    """Add each coordinate, with a random sign, to ``REPEATS`` random positions."""
    shape = (REPEATS, part.shape[1])
    device = part.device
    places = torch.randint(out.shape[1], shape, generator=generator, device=device)
    signs = torch.randint(2, shape, generator=generator, device=device, dtype=torch.int8) * 2 - 1
    for place, sign in zip(places, signs, strict=True):
        out.index_add_(1, place, part * sign)
