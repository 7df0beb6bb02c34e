"""Scores of sources, computed during training, that update the mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, final

import torch
from attrs import field
from torch import Tensor, nn

from hgms_core import component
from hgms_core.validators import at_least

Loss = Callable[[nn.Module, Any], Tensor]


class Rule(Protocol):
    """Scores of the sources, in their order.

    A source with a larger score gets more weight. Each call receives ``rows`` rows of each source
    (batches by name) and ``upper`` validation rows. The trainer has collated the batches.
    """

    rows: int
    upper: int

    def scores(
        self, loss: Loss, model: nn.Module, lower: Mapping[str, Any], upper: Any, optimizer: Any
    ) -> Tensor: ...


@final
@component
class Alignment:
    """Benefit for validation of a step on each source: cosines of gradients of the trainer's loss::

        a_s = ⟨∇f, u_s⟩ / (‖∇f‖ ‖u_s‖),    u_s = D_s ∇ℓ_s,    D_s = 1/(√(βv + (1 − β)(∇ℓ_s)²) + ε)

    v, β and ε come from an optimiser that stores Adam's second moments in the shape of the
    parameters (Adam, AdamW, NAdam, RAdam). With another optimiser (SGD, Adafactor), D = 1. The
    scores correspond to the hypergradient ``aligned`` for one step of the training itself.

    Use when validation rows represent the goal of the model. Avoid when they are few and noisy: the
    cosine is then near zero for all sources, and the mixture hardly changes.

    Parameters
    ----------
    rows
        Fresh rows of each source.
    upper
        Validation rows.

    Notes
    -----
    Cost: one gradient per source and one for validation.

    Source: this project (the component ``aligned``); LESS (Xia et al. 2024) has the same
    cosines.
    """

    name: ClassVar[str] = "alignment"
    rows: int = field(default=8, validator=at_least(1))
    upper: int = field(default=8, validator=at_least(1))

    def scores(
        self, loss: Loss, model: nn.Module, lower: Mapping[str, Any], upper: Any, optimizer: Any
    ) -> Tensor:
        leaves = [leaf for leaf in model.parameters() if leaf.requires_grad]
        wanted = _gradient(loss, model, upper, leaves)
        moments = _moments(leaves, optimizer)
        own = []
        for batch in lower.values():
            direction = _in_adams_metric(_gradient(loss, model, batch, leaves), moments)
            length = _dot(direction, direction).sqrt() * _dot(wanted, wanted).sqrt()
            own.append(torch.where(length > 0, _dot(wanted, direction) / length, 0.0))
        return torch.stack(own)


def _gradient(loss: Loss, model: nn.Module, batch: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.autograd.grad(loss(model, batch), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if part is None else part.detach()
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _in_adams_metric(gradients: Sequence[Tensor], moments: Sequence[_Moment]) -> list[Tensor]:
    return [
        part if value is None else part / ((beta * value + (1 - beta) * part.square()).sqrt() + eps)
        for part, (value, beta, eps) in zip(gradients, moments, strict=True)
    ]


_Moment = tuple[Tensor | None, float, float]
"""Adam's second moment of a parameter before the next gradient, or None, with β and ε."""


def _moments(leaves: Sequence[Tensor], optimizer: Any) -> list[_Moment]:
    """Return Adam's second moments from the state of the optimiser.

    The moment is None for a parameter without a state. If a parameter has another kind of state,
    all moments are None: D = 1.
    """
    from accelerate.optimizer import AcceleratedOptimizer

    none: _Moment = (None, 0.0, 0.0)
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    groups = [] if inner is None else inner.param_groups
    of_leaf = {id(leaf): group for group in groups for leaf in group["params"]}
    found = []
    for leaf in leaves:
        group = of_leaf.get(id(leaf), {})
        state = inner.state.get(leaf) if group else None
        value = (state or {}).get("exp_avg_sq")
        betas = group.get("betas")
        # Adafactor has no betas, and GaLore's moments have another shape.
        if state and not (
            isinstance(value, Tensor)
            and value.shape == leaf.shape
            and isinstance(betas, tuple | list)
            and isinstance(group.get("eps"), int | float)
        ):
            return [none] * len(leaves)
        found.append((value, float(betas[1]), float(group["eps"])) if state else none)
    return found


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(left, right, strict=True):
        total += torch.dot(a.flatten().double(), b.flatten().double()).cpu()
    return total
