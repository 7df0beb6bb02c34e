"""A loss as a criterion of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

from attrs import frozen
from torch import Tensor

from hgms_core import Batch, ConfigError, Loss, Tree
from hgms_core.capabilities import Capabilities, HasOutputs, find

Outputs = Callable[[Tree, Batch], Any]
"""``outputs(x, batch)``: a tensor, or a tree of tensors."""
Criterion = Callable[[Tree, Tree, Any, Batch], Tensor]
"""``criterion(theta, x, z, batch)``: a scalar."""


@final
@frozen(eq=False, kw_only=True)
class Composite:
    """The loss g(θ, x; batch) = criterion(θ, x, outputs(x; batch), batch), called as any loss.

    Parameters
    ----------
    outputs
        The model's outputs, a function of x and the batch only (a network's logits, ``[B, C]``).
    criterion
        a scalar function of the outputs; convex in (x, z) for a Gauss–Newton matrix without
        negative curvature.
    value
        The same loss, if its value must be computed in another order (by default: as above).

    Examples
    --------
    >>> import torch
    >>> loss = Composite(
    ...     outputs=lambda x, batch: batch["a"] @ x["w"],
    ...     criterion=lambda theta, x, z, batch: theta["t"] * (z * z).sum(),
    ... )
    >>> loss({"t": torch.tensor(2.0)}, {"w": torch.ones(2)}, {"a": torch.eye(2)})
    tensor(4.)
    """

    capabilities: ClassVar[Capabilities] = frozenset({HasOutputs})

    outputs: Outputs
    criterion: Criterion
    value: Loss | None = None

    def __call__(self, theta: Tree, x: Tree, batch: Batch) -> Tensor:
        if self.value is not None:
            return self.value(theta, x, batch)
        return self.criterion(theta, x, self.outputs(x, batch), batch)


def composite(loss: Loss, wanted_by: str) -> tuple[Outputs, Criterion]:
    """Return (outputs, criterion) of a loss.

    Raises
    ------
    ConfigError
        ``not-supported`` if the loss does not declare them.
    """
    known = find(loss, HasOutputs)
    if known is None:
        raise ConfigError(
            "not-supported",
            f"{wanted_by} requires a lower loss with outputs and a criterion, but the lower loss "
            "of the problem has none",
            place=("g",),
            hint="use g = hgms.gauss_newton.Composite(outputs=…, criterion=…), where g(θ, x, batch)"
            " = criterion(θ, x, outputs(x, batch), batch)",
        )
    return known.outputs, known.criterion
