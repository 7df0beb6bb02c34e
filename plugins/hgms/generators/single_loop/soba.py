"""SOBA: one simultaneous step of the lower state x, of the linear system's v, and of θ.

All directions are computed at the same point.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.config import lowering
from hgms_core import Candidates, Cost, Key, Loss, Problem, State, Tree, component, slopes
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.trees import require_grad
from hgms_core.validators import optional_positive, positive, share


@final
@component
class Soba:
    """(x, v) and θ move one step at once; all three directions use the same point and the same
    batches::

        D_x = ∇_x g,  D_v = ∇²_xx g v + ∇_x f,  D_θ = ∇²_θx g v + ∇_θ f
            (v tracks −(∇²_xx g)⁻¹ ∇_x f)
        x ← x − η_k D_x,  v ← v − ρ_k D_v,  θ ← outer(θ, D_θ)  η_k = lr/(k+1)^p,  ρ_k = v_lr/(k+1)^p

    The only candidate is the moved x. It carries D_θ (``aux``: ``theta.<name>``; ``upper_loss`` and
    ``lower_gradient_norm`` at the old point) to the hypergradient ``carried``.

    Use when an outer step must cost no more than a few gradients. Avoid when ∇²_xx g has
    eigenvalues below 0 along ∇_x f: v then grows without bound (such a run is stopped; with
    ``max_norm`` it continues).

    Parameters
    ----------
    lr, v_lr
        η and ρ.
    decay
        p; the paper's decreasing steps are p = ½, with the same schedule for θ (``sgd`` with
        ``schedule = {kind = "inverse", decay_steps = 1, power = 0.5}``).
    batch_size, upper_batch_size
        Lower rows, and validation rows of the role ``differentiate`` (None: all).
    max_norm
        Radius of the ball onto which v is projected after each step (None: no projection, as in the
        paper).

    Notes
    -----
    Cost: 1 lower gradient, 1 upper gradient, 1 Hessian product and 1 cross product in four passes:
    forward and backward through f; forward and backward through g; and one backward pass through
    that for both products. Memory: one graph of a gradient.

    Source: Dagréou, Ablin, Vaiter, Moreau, *A framework for bilevel optimization that enables
    stochastic and global variance reduction algorithms*, NeurIPS 2022 (arXiv 2201.13409), algorithm
    SOBA.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.tensor([3.0])},
    ...     x0={"x": torch.tensor([2.0])},
    ...     g=lambda t, x, _: 0.5 * ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: 0.5 * (x["x"] ** 2).sum(),
    ... )
    >>> soba = Soba(lr=0.5, v_lr=0.5)
    >>> moved = soba.propose(problem, problem.theta0, soba.init(problem, Key(0)), Key(0))
    >>> (
    ...     moved.x["x"],
    ...     moved.aux["v.x"],
    ...     moved.aux["theta.t"],
    ... )  # D_x = −1, D_v = 2, D_θ = 0 as v was 0
    (tensor([[2.5000]]), tensor([[-1.]]), tensor([[0.]]))
    """

    name: ClassVar[str] = "soba"
    needs: ClassVar[frozenset[str]] = frozenset({"smooth-lower"})

    lr: float = field(default=0.1, validator=positive)
    v_lr: float = field(default=0.1, validator=positive)
    decay: float = field(default=0.0, validator=share)
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    max_norm: float | None = field(default=None, validator=optional_positive)

    memory_hints = lowering(other=["batch_size"])

    def init(self, problem: Problem, key: Key) -> State:
        return {
            "x": dict(problem.x0),
            "v": {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()},
            "step": 0,
        }

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        below, rows = problem.lower_data.sample(key.fold("lower"), self.batch_size)
        validation = problem.upper_data["differentiate"]
        above, upper_rows = validation.sample(key.fold("upper"), self.upper_batch_size)
        rates = [lr / (start["step"] + 1) ** self.decay for lr in (self.lr, self.v_lr)]
        settings = (self.name, self, problem.g, problem.f)
        function = partial(self._step_tensors, (problem.g, problem.f))
        trees = (start["x"], start["v"], theta, below, above)
        moved, aux, loss = launch(problem.compiler, settings, function, rates, *trees)
        cost = Cost(
            lower_gradients=1,
            upper_gradients=1,
            products=1,
            cross_products=1,
            rows=3 * rows + upper_rows,
        )
        stacked, aux = ({name: leaf[None] for name, leaf in tree.items()} for tree in (moved, aux))

        return Candidates(x=stacked, aux=aux, losses=loss[None], cost=cost)

    def _step_tensors(
        self,
        losses: tuple[Loss, Loss],
        rates: Numbers,
        x: Tree,
        v: Tree,
        theta: Tree,
        below: Tree,
        above: Tree,
    ) -> tuple[Tree, Tree, Tensor]:
        """Take the step as a function of tensors; return (x, aux, lower loss before it).

        ``rates`` are η_k and ρ_k.
        """
        g, f = losses
        upper = require_grad(theta)
        lower = require_grad(x)
        leaves = [*upper.values(), *lower.values()]
        with torch.enable_grad(), twice_differentiable_attention():
            loss = g(upper, lower, below)
            grads = torch.autograd.grad(
                loss, list(lower.values()), create_graph=True, materialize_grads=True
            )
            parts = [(grad * part).sum() for grad, part in zip(grads, v.values(), strict=True)]
            along = torch.stack(parts).sum()
            value = f(upper, lower, above)
        # ⟨∇_x g, v⟩ is differentiated by (θ, x): one backward pass gives both products.
        both = torch._foreach_add(slopes(value, leaves), slopes(along, leaves))
        d_theta = both[: len(upper)]
        d_v = both[len(upper) :]

        rate, v_rate = rates
        d_x = [grad.detach() for grad in grads]
        moved = _descend(list(x.values()), d_x, rate)
        tracked = _descend(list(v.values()), list(d_v), v_rate)
        if self.max_norm is not None:
            length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tracked)))
            tracked = list(
                torch._foreach_mul(tracked, self.max_norm / length.clamp_min(self.max_norm))
            )
        aux = {
            **{f"v.{name}": leaf for name, leaf in zip(x, tracked, strict=True)},
            **{f"theta.{name}": leaf for name, leaf in zip(theta, d_theta, strict=True)},
            "upper_loss": value.detach(),
            "lower_gradient_norm": torch.linalg.vector_norm(torch.stack(torch._foreach_norm(d_x))),
        }
        return dict(zip(x, moved, strict=True)), aux, loss.detach()

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return {
            "x": candidates.at(0),
            "v": {name: candidates.aux[f"v.{name}"][0] for name in candidates.x},
            "step": start["step"] + 1,
        }


def _descend(leaves: list[Tensor], directions: list[Tensor], rate: float | Tensor) -> list[Tensor]:
    if isinstance(rate, Tensor):
        return [leaf - rate * direction for leaf, direction in zip(leaves, directions, strict=True)]
    return list(torch._foreach_add(leaves, directions, alpha=-rate))
