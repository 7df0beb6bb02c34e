"""Branches that search for flat lower minimisers: sharpness-aware Adam and averaged iterates, for
any pipeline.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, launch
from hgms.config import lowering
from hgms.methods.crossfit.lower import SharpnessAware, advance, branch, part
from hgms_core import Batch, Candidates, Cost, Key, Loss, Problem, State, Tree, component, stack
from hgms_core.validators import not_negative, optional_positive, positive


@final
@component
class FlatBranches:
    """Run N branches of sharpness-aware Adam on the lower loss, K steps each; a candidate is the
    average of the iterates::

        x⁺ = x + ρ‖x‖ ∇g(θ, x; B)/‖∇g(θ, x; B)‖,   x ← x − Adam(∇g(θ, x⁺; B)),   a ← d a + (1 − d) x

    If a lower level has many minimisers, this method searches for flat minimisers, which generalise
    better from wrong labels. It is the lower step of ``crossfit`` as a component: references that
    train with it show the gain from this step without the rest of the method.

    Parameters
    ----------
    count
        N; each branch draws separate batches.
    steps
        K.
    optimizer
        The rate, ρ and d of a lower step (:class:`SharpnessAware`).
    batch_size
        Lower rows of a step (``None``: all).
    noise
        Standard deviation of the noise that is added once to the start of each branch except the
        first.

    Notes
    -----
    Cost: 2NK lower gradients. Memory: 4N lower states.

    Source: Foret, Kleiner, Mobahi, Neyshabur, *Sharpness-aware minimization*, ICLR 2021 (arXiv
    2010.01412); iterate averaging: Polyak and Juditsky 1992.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.full((1,), 4.0)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> optimizer = SharpnessAware(lr=0.1, averaging=0.5)
    >>> branches = FlatBranches(count=1, steps=300, optimizer=optimizer)
    >>> candidates = branches.propose(
    ...     problem, problem.theta0, branches.init(problem, Key(0)), Key(0)
    ... )
    >>> bool(candidates.x["x"].abs() < 0.1)
    True
    """

    name: ClassVar[str] = "flat-branches"
    needs: ClassVar[frozenset[str]] = frozenset()

    count: int = field(default=1, validator=positive)
    steps: int = field(default=25, validator=positive)
    optimizer: SharpnessAware = field(factory=SharpnessAware)
    batch_size: int | None = field(default=256, validator=optional_positive)
    noise: float = field(default=0.0, validator=not_negative)

    memory_hints = lowering(other=["batch_size", "count"])

    def init(self, problem: Problem, key: Key) -> State:
        starts = [
            self._noisy(problem.x0, key.fold(number)) if number else problem.x0
            for number in range(self.count)
        ]
        return {"branches": stack([branch(x) for x in starts]), "lower_steps": 0}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        data = problem.lower_data
        function = partial(advance, partial(_only, problem.g))
        settings = (self.name, problem.g)
        ends = []
        losses = []
        for number in range(self.count):
            tree = {name: leaf[number] for name, leaf in start["branches"].items()}
            drawn = data.draw(key.fold("branch", number), self.batch_size, self.steps)
            for step in range(self.steps):
                below = data.batch(None if drawn is None else drawn[step])
                setting = self.optimizer.numbers(start["lower_steps"] + step + 1, (1.0, 0.0))
                tree, loss = launch(
                    problem.compiler, settings, function, setting, tree, theta, below, {}
                )
            ends.append(tree)
            losses.append(loss)
        calls = 2 * self.count * self.steps
        end = stack(ends)
        aux = {name: leaf for name, leaf in end.items() if name[0] != "a"}
        cost = Cost(lower_gradients=calls, rows=calls * data.count(self.batch_size))
        return Candidates(x=part("a", end), aux=aux, losses=torch.stack(losses), cost=cost)

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        averages = {f"a.{name}": leaf for name, leaf in candidates.x.items()}
        return {
            "branches": {**candidates.aux, **averages},
            "lower_steps": start["lower_steps"] + self.steps,
        }

    def _noisy(self, x: Tree, key: Key) -> Tree:
        draw = key.generator()
        noise = {
            name: torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf)
            for name, leaf in x.items()
        }
        return {name: leaf + self.noise * noise[name] for name, leaf in x.items()}


def _only(g: Loss, scales: Numbers, theta: Tree, x: Tree, below: Batch, above: Batch) -> Tensor:
    return g(theta, x, below)
