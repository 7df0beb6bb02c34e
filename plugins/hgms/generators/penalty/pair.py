"""The optimiser of the pair (w, u) of `minimax`, and its stages."""

from __future__ import annotations

import math
from typing import Literal, final

from attrs import field
from torch import Tensor

from hgms.generators.penalty import base
from hgms.optim.adam import adam, corrections
from hgms_core import Tree, component
from hgms_core.validators import decay_rate, each, not_negative, optional_positive, positive


@final
@component
class PairOptimizer:
    """The steps of w, which descends, and of u, which ascends: gradient steps or AdamW.

    Parameters
    ----------
    kind
        ``sgd`` (the gradient itself) or ``adamw``.
    lr
        η_w.
    lr_u
        η_u (None: η_w).
    betas, eps, weight_decay
        As in torch.optim.AdamW (decay is decoupled for sgd too).
    schedule
        Of both rates: ``constant``, or ``cosine``, which falls from 1 to 0 over the budget.
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: float = field(default=0.01, validator=positive)
    lr_u: float | None = field(default=None, validator=optional_positive)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=each(decay_rate))
    eps: float = field(default=1e-8, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    schedule: Literal["constant", "cosine"] = "constant"

    def rates(self, factor: float, progress: float) -> dict[str, float]:
        """Return the rates of w and u, times ``factor``. The rate of u is negative: u ascends."""
        if self.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return {"w": self.lr * factor, "u": -(self.lr if self.lr_u is None else self.lr_u) * factor}

    def numbers(self, rate: float, counts: tuple[int, int]) -> list[float]:
        """Return the rate, the decay factor, and Adam's two coefficients at each step count."""
        numbers = [rate, 1 - abs(rate) * self.weight_decay]
        for count in counts:
            numbers += corrections(rate, max(count, 1), self.betas)
        return numbers

    def step(
        self,
        x: Tree,
        slope: Tree,
        before: dict[str, Tree],
        rate: float | Tensor,
        left: float | Tensor,
        scale: float | Tensor,
        correction: float | Tensor,
    ) -> tuple[Tree, dict[str, Tree]]:
        """Take one step against ``slope``, with the numbers of :meth:`numbers`.

        A negative rate moves along ``slope``, because both directions are odd in the rate.
        """
        if self.weight_decay:
            x = {name: leaf * left for name, leaf in x.items()}
        if self.kind == "sgd":
            return base.descend(x, slope, rate), {}
        x, m, v = adam(
            x, slope, before["m"], before["v"], (scale, correction), betas=self.betas, eps=self.eps
        )
        return x, {"m": m, "v": v}


@final
@component
class Stages:
    """Stages of equal length; each multiplies α by ``factor`` and divides the rates by it.

    Parameters
    ----------
    factor
        τ.
    steps
        Outer steps of a stage (None: one stage).
    """

    factor: float = field(default=1.0, validator=positive)
    steps: int | None = field(default=None, validator=optional_positive)

    def at(self, step: int) -> tuple[float, float]:
        """Return τ^s and τ^−s at outer step ``step``; s is the number of finished stages."""
        finished = 0 if self.steps is None else step // self.steps
        return self.factor**finished, self.factor**-finished
