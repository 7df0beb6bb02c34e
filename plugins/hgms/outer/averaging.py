"""Dual averaging on the simplex: the step depends on the mean of all hypergradients.

It does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms_core import State, Tree, component, hookimpl
from hgms_core.validators import not_negative, positive, share


@final
@component
class DualAveraging:
    """Logits θ of weights ω = softmax(θ), determined by the mean of all hypergradients::

        c_t = h_t/ω_t    (the derivative in ω, Σ_s ω_s c_s = 0, from the one in θ)
        θ_{t+1} = θ_0 − τ · Σ_{k ≤ t} γ^{t−k} c_k / (Σ_{k ≤ t} γ^{t−k} + t₀)
            (γ = 1: 1/(t + t₀) Σ c_k)

    For a given mean, the distance of θ from its start is fixed. With the mean c̄, ω minimises Σ_s
    ω_s c̄_s + 1/τ · KL(ω‖ω_0): the start is a prior, and 1/τ is its strength. So a longer budget
    makes the mean more certain, but not the mixture more extreme. If c is only noise, θ − θ_0
    shrinks as 1/√t, while a gradient method on logits moves into a corner. The mean
    starts with t₀ zeros.

    Use for mixtures of data sources with ``aligned``, for which c is between −2 and 2. Avoid if θ
    does not consist of one softmax's logits per leaf. Avoid also if the scale of the hypergradient
    is unknown: τ is in its units.

    Parameters
    ----------
    strength
        τ. Two sources whose c differ by d end with weights in the ratio e^(τd) relative to their
        prior.
    prior_steps
        t₀.
    decay
        γ in [0, 1]. Use a value below 1 if hypergradients are already means, or change as x is
        trained: the last 1/(1 − γ) steps count.

    Notes
    -----
    Cost: no oracle calls; the state stores one number per number of θ.

    Source: Nesterov 2009 and Xiao 2010 (regularised dual averaging), with the entropy of Beck &
    Teboulle 2003; natural gradients of a softmax: Amari 1998.

    Examples
    --------
    >>> outer = DualAveraging(strength=2.0, prior_steps=0.0)
    >>> theta = start = {"t": torch.zeros(2)}
    >>> state = outer.init(start)
    >>> for _ in range(3):  # c = (−1, 1) each time
    ...     omega = theta["t"].softmax(0)
    ...     c = torch.tensor([-1.0, 1.0])
    ...     theta, state = outer.step(theta, {"t": omega * (c - omega @ c)}, state, 0.0)
    >>> theta["t"][0] - theta["t"][1]  # τ · 2, after one step as after three
    tensor(4.)
    """

    name: ClassVar[str] = "dual-averaging"
    testing_failures: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("quadratic", "simplex"),
        (
            "θ are logits of weights that add up to 1: h/ω is the derivative in ω there, and means "
            "nothing elsewhere"
        ),
    )
    strength: float = field(default=20.0, validator=positive)
    prior_steps: float = field(default=10.0, validator=not_negative)
    decay: float = field(default=1.0, validator=share)

    def init(self, theta: Tree) -> State:
        return {
            "weight": 0.0,
            "start": dict(theta),
            "sum": {name: torch.zeros_like(leaf) for name, leaf in theta.items()},
        }

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        weight: float = self.decay * state["weight"] + 1
        total = {
            name: self.decay * state["sum"][name] + _of_weights(theta[name], gradient[name])
            for name in theta
        }
        scale = self.strength / (weight + self.prior_steps)
        moved = {name: state["start"][name] - scale * total[name] for name in theta}
        return moved, {"weight": weight, "start": state["start"], "sum": total}


def _of_weights(logits: Tensor, h: Tensor) -> Tensor:
    """Compute h/ω, centred so that Σ_s ω_s c_s = 0.

    An entry is 0 if its weight is too small for the division.
    """
    omega = logits.reshape(-1).softmax(0)
    least = torch.finfo(omega.dtype).tiny / torch.finfo(omega.dtype).eps
    c = torch.where(omega > least, h.reshape(-1) / omega.clamp_min(least), torch.zeros_like(omega))
    return (c - omega @ c).reshape(logits.shape)


@hookimpl
def hgms_register_outer_optimizers() -> list[type]:
    return [DualAveraging]
