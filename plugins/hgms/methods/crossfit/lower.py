"""One lower step of a branch: sharpness-aware AdamW without decay, and the average of the
iterates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers
from hgms.optim.adam import adam, corrections
from hgms_core import Batch, Tree, component, norm
from hgms_core.trees import require_grad
from hgms_core.validators import decay_rate, not_negative, positive

BETAS = (0.9, 0.99)
EPS = 1e-8

Objective = Callable[[Numbers, Tree, Tree, Batch, Batch], Tensor]
"""The objective of a branch, ``objective(scales, theta, x, below, above)``, on a lower and a
validation batch. ``scales`` are the weights of the lower rows and of the validation rows.
"""


def branch(x: Tree) -> Tree:
    """Return the state of a branch before its first step, as one tree: x, Adam's moments m and v,
    and the averaged iterate.
    """
    zeros = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    return _join(x, zeros, zeros, x)


def _join(*trees: Tree) -> Tree:
    return {
        f"{which}.{name}": leaf
        for which, tree in zip("xmva", trees, strict=True)
        for name, leaf in tree.items()
    }


def part(which: str, tree: Tree) -> Tree:
    """Return one of the trees in a branch: ``x``, ``m``, ``v`` or ``a``, the averaged iterate."""
    return {name[2:]: leaf for name, leaf in tree.items() if name[0] == which}


@final
@component
class SharpnessAware:
    """Sharpness-aware Adam with averaged iterates, the step of :func:`advance`.

    Parameters
    ----------
    lr
        Adam's rate; its moments have β = 0.9, 0.99.
    sharpness
        ρ, relative to ‖x‖; 0 is a plain Adam step, at twice its cost.
    averaging
        The decay of the average, smaller in the first steps.
    """

    lr: float = field(default=0.01, validator=positive)
    sharpness: float = field(default=0.05, validator=not_negative)
    averaging: float = field(default=0.98, validator=decay_rate)

    def numbers(self, count: int, scales: tuple[float, float], factor: float = 1.0) -> list[float]:
        """Return the scalar arguments of :func:`advance` for step number ``count``.

        ``count`` starts at 1. ``factor`` multiplies the rate.
        """
        decay = min(self.averaging, count / (count + 9))
        return [*corrections(self.lr * factor, count, BETAS), self.sharpness, decay, *scales]


def advance(
    objective: Objective, steps: Numbers, tree: Tree, theta: Tree, below: Batch, above: Batch
) -> tuple[Tree, Tensor]:
    """Return the branch after one step, and the value of its objective before the step::

    x⁺ = x + ρ‖x‖ ∇L(x)/‖∇L(x)‖,    x ← x − Adam(∇L(x⁺)),    a ← d a + (1 − d) x
    """
    scale, correction, sharpness, decay, *scales = steps
    x, first, second, average = (part(which, tree) for which in "xmva")

    def slope(at: Tree) -> tuple[Tree, Tensor]:
        leaves = require_grad(at)
        with torch.enable_grad():
            value = objective(scales, theta, leaves, below, above)
            grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return dict(zip(at, grads, strict=True)), value.detach()

    grads, value = slope(x)
    length = sharpness * norm(x) / norm(grads).clamp_min(torch.finfo(value.dtype).tiny)
    grads, _ = slope({name: leaf + length * grads[name] for name, leaf in x.items()})
    x, first, second = adam(x, grads, first, second, (scale, correction), betas=BETAS, eps=EPS)
    average = {name: leaf + (1 - decay) * (x[name] - leaf) for name, leaf in average.items()}
    return _join(x, first, second, average), value
