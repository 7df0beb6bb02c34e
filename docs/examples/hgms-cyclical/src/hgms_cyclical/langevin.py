"""One Langevin chain with a cyclical step size: each cycle ends in a candidate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms_core import Candidates, Cost, Key, Problem, State, Tree, component, detach, repeat
from hgms_core.capabilities import Capabilities, HasTestingInstance
from hgms_core.hypergrad import twice_differentiable_attention
from hgms_core.validators import not_negative, optional_positive, positive, share


@final
@component
class CyclicalLangevin:
    """One chain in N cycles of C steps that explore with large steps and then sample exp(−g(θ,
    x)/λ) with small ones.

    Step k = 1, …, N·C, with a batch B_k and ξ ~ N(0, I)::

        α_k = (α₀/2) [cos(π mod(k − 1, C)/C) + 1]
        x ← x − α_k ∇_x g(θ, x; B_k)    while mod(k − 1, C)/C < β   (exploration)
        x ← x − α_k ∇_x g(θ, x; B_k) + √(2 α_k λ) ξ           after that                  (sampling)

    Candidate i = 1, …, N is the state after i·C steps. Every cycle therefore starts from the
    previous candidate.

    Noise-free steps contract: with β > 0 candidates spread less than exp(−g/λ) does, unless the
    sampling steps of one cycle are enough to forget its start (Σ α_k over them well above
    1/curvature).

    Use when you need N lower minimisers at the price of one long chain, and large steps can leave a
    basin. Avoid when candidates must be independent (``ula``, ``branches``): each cycle starts at
    the end of the last, and the replay of a candidate runs all earlier cycles.

    Parameters
    ----------
    count
        N, cycles and candidates.
    cycle_steps
        C, lower steps of a cycle.
    lr
        α₀, the step size at the start of every cycle. Stability needs α₀ < 2/L, with L the largest
        curvature of g.
    exploration
        β in [0, 1], the share of a cycle without noise; 1 is gradient descent with warm restarts.
    temperature
        λ ≥ 0, in the units of g.
    batch_size
        Examples per step; None uses all.
    carry_rule
        The next outer step starts from the ``selected`` candidate, from the ``last`` one, as one
        chain that never ends, or from a newly drawn lower state (``restart``).

    Notes
    -----
    Cost: N·C lower gradients; to replay candidate i, i·C and as many products and cross products.

    Memory: N + 2 lower states and one gradient; in a replay, the graphs of all differentiated
    gradients.

    Source: Zhang, Li, Zhang, Chen, Wilson, *Cyclical stochastic gradient MCMC for Bayesian deep
    learning*, ICLR 2020 (arXiv 1902.03932), equation 1 and Algorithm 1; here with one sample per
    cycle, at its end.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.full((1,), 4.0)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> chain = CyclicalLangevin(count=3, cycle_steps=2, lr=0.25, temperature=0.0)
    >>> chain.propose(problem, problem.theta0, chain.init(problem, Key(0)), Key(0)).x["x"].flatten()
    tensor([1.5000, 0.5625, 0.2109])
    """

    name: ClassVar[str] = "cyclical-langevin"
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})

    count: int = field(default=4, validator=positive)
    cycle_steps: int = field(default=50, validator=positive)
    lr: float = field(default=0.1, validator=positive)
    exploration: float = field(default=0.25, validator=share)
    temperature: float = field(default=1e-3, validator=not_negative)
    batch_size: int | None = field(default=None, validator=optional_positive)
    carry_rule: Literal["selected", "last", "restart"] = "selected"

    @classmethod
    def testing_instance(cls) -> CyclicalLangevin:
        """Return an instance for ``hgms check``: short cycles with many sampling steps, hot enough
        to cross a barrier of 1/4.
        """
        return cls(count=3, cycle_steps=10, lr=0.2, exploration=0.1, temperature=0.2)

    def step_size(self, k: int) -> float:
        """Return α_k of step k = 1, 2, …"""
        return self.lr / 2 * (math.cos(math.pi * self._place(k)) + 1)

    def samples(self, k: int) -> bool:
        """Return whether step k adds noise."""
        return self._place(k) >= self.exploration

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    # start: propose
    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        steps = self.count * self.cycle_steps
        x = repeat(start["x"], self.count)
        losses = next(iter(x.values())).new_empty(self.count)
        for k, (point, loss) in enumerate(
            self._chain(problem, theta, start["x"], key, steps, within=0), start=1
        ):
            cycle, rest = divmod(k, self.cycle_steps)
            if rest == 0:
                losses[cycle - 1] = loss
                for name, leaf in point.items():
                    x[name][cycle - 1] = leaf

        def replay(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
            return self._replay(problem, theta, start, key, int(index), last)

        rows = problem.lower_data.count(self.batch_size)
        return Candidates(
            x=x, losses=losses, cost=Cost(lower_gradients=steps, rows=steps * rows), replay=replay
        )

    def _replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: int, last: int | None
    ) -> tuple[Tree, Cost]:
        steps = (index + 1) * self.cycle_steps
        within = steps if last is None else min(last, steps)
        if not any(leaf.requires_grad for leaf in theta.values()):
            within = 0  # forward only, without a graph
        *_, (point, _) = self._chain(problem, theta, start["x"], key, steps, within)
        rows = problem.lower_data.count(self.batch_size) * (steps + 2 * within)
        return point, Cost(lower_gradients=steps, products=within, cross_products=within, rows=rows)

    # end: propose

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        if self.carry_rule == "restart":
            return {"x": dict(problem.initial(key))}
        return {
            "x": candidates.at(index if self.carry_rule == "selected" else candidates.count - 1)
        }

    def _place(self, k: int) -> float:
        return (k - 1) % self.cycle_steps / self.cycle_steps

    def _chain(
        self, problem: Problem, theta: Tree, x: Tree, key: Key, steps: int, within: int
    ) -> Iterator[tuple[Tree, Tensor]]:
        """Yield the state after each step, and g before it. The last ``within`` steps keep their
        graph in ``theta``.

        Batches and noise depend only on ``key``, in the order of the steps, so a replay repeats the
        chain.
        """
        data = problem.lower_data
        still = detach(theta)
        rows = data.draw(key.fold("batches"), self.batch_size, self.count * self.cycle_steps)
        noise = key.fold("noise").generator(next(iter(x.values())).device)
        for k in range(1, steps + 1):
            kept = k > steps - within
            rate = self.step_size(k)
            batch = data.batch(None if rows is None else rows[k - 1])
            leaves = [
                leaf if leaf.requires_grad else leaf.detach().requires_grad_()
                for leaf in x.values()
            ]
            with (
                torch.enable_grad(),
                twice_differentiable_attention() if kept else contextlib.nullcontext(),
            ):
                loss = problem.g(theta if kept else still, dict(zip(x, leaves, strict=True)), batch)
                grads = torch.autograd.grad(loss, leaves, create_graph=kept, materialize_grads=True)
            with torch.set_grad_enabled(kept):
                moved = [leaf - rate * grad for leaf, grad in zip(leaves, grads, strict=True)]
                if self.temperature and self.samples(k):
                    scale = math.sqrt(2 * rate * self.temperature)
                    moved = [leaf + scale * _normal(leaf, noise) for leaf in moved]
            x = dict(zip(x, moved, strict=True))
            yield x, loss.detach()


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
