"""FastMix: source weights from the agreement of source gradients with the validation gradient."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms.optim.adam import adam, corrections
from hgms.rows import mixture_slope
from hgms_core import ConfigError, Cost, Key, Problem, Record, State, Tree, component, gradient
from hgms_core.validators import decay_rate, each, not_negative, optional_positive, positive


@final
@component
class FastMix(hgms_mix.lm.PhasedMethod):
    """One model is trained on the mixture while the mixture is learned; one step is::

        x ← AdamW on g(ω, x) = Σ_s ω_s ℓ_s(x),
            ``updates`` times, batches with equally many rows of each source
        a_s = ⟨∇f(x), ∇ℓ_s(x)⟩                                 on a fresh batch
        h = ∂/∂θ (−lr Σ_s ω_s(θ) a_s),      θ ← Adam(θ, h)      ω = softmax(θ)

    h is the derivative in θ of f(x − lr Σ_s ω_s ∇ℓ_s(x)) to first order. A source gains weight if
    its gradient has the direction of the gradient of the validation loss. The products may use only
    some leaves of x; the authors use the output layer.

    Use when only one run is possible, and sources differ much. Avoid conclusions from the weights
    of a single run: Adam scales noise to full length, so that the weights of two halves of one
    source diverge. Avoid also if the answers of a source are very short: their gradients are long,
    and products grow with length. Avoid also if the best mixture is not a corner: the step looks
    one update ahead.

    Cost per step: ``updates`` lower gradients, S lower gradients on 1/S of the rows each, and
        1 upper gradient. Memory: 3 lower states between steps, 10 within one.

    Parameters
    ----------
    updates
        Of x, in one outer step.
    lr, weight_decay, betas, eps, batch_size
        AdamW of x (batch_size None: all rows).
    outer_lr, outer_betas
        Adam's, of θ (β₂ = 0.999 and ε = 1e-8 are the authors').
    search_batch_size
        Lower rows of the products; None: ``batch_size``.
    upper_batch_size
        Validation rows of ∇f, of the role ``differentiate``; None: all.
    leaves
        a regular expression; products use the leaves of x with a match in their names (empty: all
        leaves).

    Raises
    ------
    ConfigError
        For a problem without sources or validation rows, and ``leaves`` that match no name.
    NumericalError
        For infinite losses.

    Notes
    -----
    Source: Tan et al., *FastMix: fast data mixture optimization via gradient descent*, ICLR 2026
    (arXiv 2606.14971).

    Examples
    --------
    >>> FastMix(leaves="lm_head").outer_lr
    0.01
    """

    name: ClassVar[str] = "fastmix"
    testing: ClassVar[Mapping[str, Any]] = {
        "updates": 1,
        "lr": 0.02,
        "weight_decay": 0.0,
        "outer_lr": 0.1,
    }

    updates: int = field(default=10, validator=positive)
    lr: float = field(default=4e-4, validator=positive)
    weight_decay: float = field(default=0.1, validator=not_negative)
    betas: tuple[float, float] = field(default=(0.9, 0.95), validator=each(decay_rate))
    batch_size: int | None = field(default=16, validator=optional_positive)
    outer_lr: float = field(default=0.01, validator=positive)
    outer_betas: tuple[float, float] = field(default=(0.5, 0.999), validator=each(decay_rate))
    search_batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=32, validator=optional_positive)
    leaves: str = ""

    memory_hints = lowering(other=["batch_size", "search_batch_size", "upper_batch_size"])

    def __attrs_post_init__(self) -> None:
        try:
            re.compile(self.leaves)
        except re.error as error:
            raise ConfigError(
                "wrong-value",
                f"leaves={self.leaves!r} is not a regular expression: {error}",
                place=("leaves",),
            ) from None

    def init(self, problem: Problem, seed: int) -> State:
        started = self.start(problem, seed, "mix")
        hgms_mix.lm.check_role(
            problem, "method 'fastmix' compares gradients with that of", "differentiate"
        )
        self._compared_leaves(problem.x0)
        zeros = {name: torch.zeros_like(leaf) for name, leaf in problem.theta0.items()}
        return {**started, "theta": dict(problem.theta0), "m": zeros, "v": dict(zeros)}

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"mix": self._mix}

    def _mix(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        key = Key(state["seed"])
        step = state["step"] + 1
        train, loss, spent = hgms_mix.lm.adamw_on_mixture(
            problem,
            state["theta"],
            state,
            self,
            batch_size=self.batch_size,
            key=key.fold("batches"),
            count=self.updates,
        )
        x = hgms_mix.lm.adamw_part(train, "x")
        products, upper, cost = self._products(problem, x, key.fold("search", step), step)
        h = mixture_slope(
            self.sources(problem),
            state["theta"],
            self.lr * products,
            torch.ones_like(products, dtype=torch.bool),
            redrawn=False,
        )
        theta, m, v = adam(
            state["theta"],
            h,
            state["m"],
            state["v"],
            corrections(self.outer_lr, step, self.outer_betas),
            betas=self.outer_betas,
            eps=1e-8,
        )
        changes: State = {
            "train": train,
            "theta": theta,
            "m": m,
            "v": v,
            "at": state["at"] + self.updates,
        }
        shown = {
            f"product.{name}": product
            for name, product in zip(self.sources(problem).names, products, strict=True)
        }
        return changes, {"lower_loss": loss, "upper_loss": upper, **shown}, spent + cost

    def _products(
        self, problem: Problem, x: Tree, key: Key, step: int
    ) -> tuple[Tensor, Tensor, Cost]:
        """Return a_s of each source (0 for a source without rows in the batch), f and the cost."""
        sources = self.sources(problem)
        grads, value, spent = hgms_mix.lm.upper_gradient(
            problem, x, key.fold("upper"), self.upper_batch_size, step
        )
        compared = self._compared_leaves(x)
        target = [grads[place] for place in compared]
        data = problem.lower_data
        size = min(self.search_batch_size or self.batch_size or data.size, data.size)
        index = data.numbers(key.fold("lower"), size, 1)[0]
        source = data.rows(index)["source"]
        products = torch.zeros(len(sources.names), dtype=torch.float64)
        held = source.unique().tolist()
        for number in held:
            own = data.rows(index[(source == number).to(index.device)])
            grads, loss = gradient(sources.pooled, problem.theta0, x, own)
            hgms_mix.lm.check_finite(
                loss,
                f"the loss of source {sources.names[number]!r}",
                step,
                hint="decrease lr, or check the rows of this source",
            )
            terms = [
                (grads[place] * leaf).sum(dtype=torch.float64)
                for place, leaf in zip(compared, target, strict=True)
            ]
            products[number] = torch.stack(terms).sum()
        return products, value, spent + Cost(lower_gradients=len(held), rows=size)

    def _compared_leaves(self, x: Tree) -> list[int]:
        """Return the positions of the leaves that the products use."""
        places = [place for place, name in enumerate(x) if re.search(self.leaves, name)]
        require(
            places,
            "unknown-leaves",
            f"leaves={self.leaves!r} matches no lower variable (available: "
            f"{', '.join(list(x)[:8])}{', …' if len(x) > 8 else ''})",
            place=("method", "leaves"),
            hint="remove it to compare all variables: an adapter on a frozen model does not train "
            "the output layer",
        )
        return places
