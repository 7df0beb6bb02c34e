"""Shared parts of the penalty generators: N branches around one step, and their carried state.

A branch's lower state is ``x``. Its other variables (ω, u or z, moments) are stored in ``aux``
under ``<variable>.<leaf>``. ``aux`` also contains the data for the hypergradient ``carried``: the
upper gradient of the same pass (``theta.<leaf>``) and, under names without a dot, measurements
(``upper_loss``, ``lower_gradient_norm``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from attrs import field
from torch import Tensor

from hgms.compiled import Numbers, Programs, form, launch
from hgms.config import lowering
from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Data,
    Key,
    Loss,
    Problem,
    State,
    Tree,
    component,
    gradient,
    norm,
    slopes,
    stack,
)
from hgms_core.trees import require_grad
from hgms_core.validators import not_negative, optional_positive, positive

STEPS = 5
"""Maximum lower steps per compiled function. The compile time grows with their number."""

Step = Callable[[Tree, Tree, Key], tuple[Tree, Tree, Tensor]]
"""The step of one branch: (x, aux, key) → (next x, next aux, lower loss before the step)."""


def tag(variable: str, tree: Tree) -> Tree:
    return {f"{variable}.{name}": leaf for name, leaf in tree.items()}


def untag(variable: str, aux: Tree) -> Tree:
    return {
        name[len(variable) + 1 :]: leaf
        for name, leaf in aux.items()
        if name.startswith(variable + ".")
    }


@component
class PenaltyGenerator:
    """What the penalty generators share: N branches around one step, and their carried state."""

    name: ClassVar[str]
    twins: ClassVar[tuple[str, ...]] = ()
    """Variables that start equal to x."""

    count: int = field(default=1, validator=positive)
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    noise: float = field(default=0.0, validator=not_negative)
    carry_rule: Literal["selected", "per-branch"] = "selected"

    memory_hints = lowering(other=["batch_size", "count"])

    def init(self, problem: Problem, key: Key) -> State:
        """Return the state before the first step: x and its ``twins``.

        The state has one copy for all branches. With ``per-branch``, it has one copy per branch,
        with the noise that makes branches differ.
        """
        above = problem.upper_data["differentiate"]
        full = is_full(problem.lower_data, self.batch_size)
        if self.count > 1 and not self.noise and full and is_full(above, self.upper_batch_size):
            raise ConfigError(
                "conflicting-options",
                f"all {self.count} candidates of generator {self.name!r} would be equal with "
                "noise=0 and full batches",
                place=("generator", "noise"),
                hint="set noise > 0, batch_size below the number of rows, or count = 1",
            )
        own = self.count if self.carry_rule == "per-branch" else 1
        x = stack(
            [
                _noisy(problem.x0, self.noise, key.fold("noise", i)) if i else problem.x0
                for i in range(own)
            ]
        )
        aux = {f"{twin}.{name}": leaf for twin in self.twins for name, leaf in x.items()}
        return {"x": x, "aux": aux, "step": 0}

    def branches(self, start: State, key: Key, step: Step, cost: Cost) -> Candidates:
        """Run ``step`` for every branch, from its stored start or with noise from the common start.

        ``cost`` is the cost of one branch. Branch 0 is free of noise. Noise is added to x only: the
        other variables of the common start approximate the lower solution, and noise would make
        them worse.
        """
        stored = next(iter(start["x"].values())).shape[0]
        if stored not in (1, self.count):
            raise ConfigError(
                "wrong-length",
                f"the carried state has {stored} branches, but count={self.count}",
                place=("generator", "count"),
            )
        ends = []
        for member in range(self.count):
            row = 0 if stored == 1 else member
            own = key.fold("branch", member)
            x = {name: leaf[row] for name, leaf in start["x"].items()}
            if stored == 1 and member:
                x = _noisy(x, self.noise, own.fold("noise"))
            ends.append(step(x, {name: leaf[row] for name, leaf in start["aux"].items()}, own))
        if self.count == 1:  # no copy in the usual case
            x, aux = (
                {name: leaf.unsqueeze(0) for name, leaf in tree.items()} for tree in ends[0][:2]
            )
        else:
            x = stack([x for x, _, _ in ends])
            aux = stack([aux for _, aux, _ in ends])
        losses = torch.stack([loss for _, _, loss in ends])
        return Candidates(x=x, aux=aux, losses=losses, cost=sum((cost for _ in ends), Cost()))

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        """Return the selected branch, or every branch, as the next start.

        Upper gradients and measurements are removed, because they belong to this step only.
        """
        x = candidates.x
        aux = {
            name: leaf
            for name, leaf in candidates.aux.items()
            if "." in name and not name.startswith("theta.")
        }
        if self.carry_rule == "selected" and self.count > 1:
            row = index.reshape(1)
            x, aux = (
                {name: leaf.index_select(0, row) for name, leaf in tree.items()}
                for tree in (x, aux)
            )
        return {**start, "x": x, "aux": aux, "step": start["step"] + 1}

    def lower_batch(self, problem: Problem, key: Key) -> Tree:
        return problem.lower_data.sample(key.fold("lower"), self.batch_size)[0]

    def upper_batch(self, problem: Problem, key: Key) -> Tree:
        """Draw a batch of the role ``differentiate``."""
        above = problem.upper_data["differentiate"]
        return above.sample(key.fold("upper"), self.upper_batch_size)[0]

    def rows(self, problem: Problem) -> tuple[int, int]:
        """Return the numbers of rows of a lower and an upper batch."""
        above = problem.upper_data["differentiate"]
        return problem.lower_data.count(self.batch_size), above.count(self.upper_batch_size)


@component
class PenaltyStep(PenaltyGenerator, ABC):
    """A penalty generator with one function of tensors as its step, which can be compiled."""

    @abstractmethod
    def numbers(self, step: int) -> tuple[float, ...]:
        """Return the numbers of outer step ``step`` (from 0)."""

    @abstractmethod
    def draw(self, problem: Problem, key: Key) -> tuple[list[Tree], list[Tree]]:
        """Draw the lower and the upper batches of one branch."""

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """Return the cost of one branch."""

    @abstractmethod
    def move(
        self,
        losses: tuple[Loss, Loss],
        numbers: Numbers,
        y: Tree,
        aux: Tree,
        theta: Tree,
        below: list[Tree],
        above: list[Tree],
    ) -> tuple[Tree, Tree, Tensor]:
        """Take the step of one branch: (next y, next aux, lower loss before the step).

        The losses are g and f.
        """

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        numbers = self.numbers(start["step"])
        settings = (self.name, self, problem.g, problem.f)
        function = partial(self.move, (problem.g, problem.f))

        def step(y: Tree, aux: Tree, key: Key) -> tuple[Tree, Tree, Tensor]:
            below, above = self.draw(problem, key)
            programs = problem.compiler if max(len(below), len(above)) <= STEPS + 1 else None
            return launch(programs, settings, function, numbers, y, aux, theta, below, above)

        return self.branches(start, key, step, self.cost(problem))

    def draw_each(self, problem: Problem, key: Key, steps: int) -> tuple[list[Tree], list[Tree]]:
        """Draw a lower and an upper batch for each of ``steps`` evaluations, independently.

        An evaluation after a step therefore does not depend on the rows of that step.
        """
        keys = [key.fold("evaluation", step) for step in range(steps)]
        return (
            [self.lower_batch(problem, own) for own in keys],
            [self.upper_batch(problem, own) for own in keys],
        )


def is_full(data: Data, batch_size: int | None) -> bool:
    """Return whether a batch of this size contains all rows."""
    return batch_size is None or batch_size >= data.size


def no_moments(x: Tree) -> Tree:
    return {f"m.{name}": torch.zeros_like(leaf) for name, leaf in x.items()}


def _noisy(x: Tree, scale: float, key: Key) -> Tree:
    if not scale:
        return x
    device = next(iter(x.values())).device
    generator = key.generator(device)
    return {
        name: leaf
        + scale * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device=device)
        for name, leaf in x.items()
    }


def gradients(value: Tensor, *trees: Tree) -> list[Tree]:
    """Return the gradient of ``value`` in each tree, in one backward pass.

    Gradients are zero for leaves that ``value`` does not depend on.
    """
    leaves = iter(slopes(value, [leaf for tree in trees for leaf in tree.values()]))
    return [{name: next(leaves) for name in tree} for tree in trees]


def with_momentum(direction: Tree, m: Tree, momentum: float) -> tuple[Tree, Tree]:
    """Return the running sum of directions after ``m``, and its entries for ``aux``.

    Without momentum, there are no entries.
    """
    if not momentum:
        return direction, {}
    direction = {name: momentum * m[name] + leaf for name, leaf in direction.items()}
    return direction, tag("m", direction)


def descend(x: Tree, direction: Tree, rate: float | Tensor) -> Tree:
    """Return x − rate·direction as new tensors, with the step length limited to max(1, ‖x‖).

    A fixed rate is too large if θ has made g steep (for example, a growing weight decay). The bound
    limits the growth of x until θ adapts.
    """
    length = (norm(direction) * rate).abs()
    factor = norm(x).clamp_min(1) / torch.maximum(length, norm(x).clamp_min(1))
    direction = {name: direction[name] * factor for name in x}  # factor 1 changes no bit
    if isinstance(rate, Tensor):
        return {name: leaf - rate * direction[name] for name, leaf in x.items()}
    moved = torch._foreach_add(list(x.values()), [direction[name] for name in x], alpha=-rate)
    return dict(zip(x, moved, strict=True))


def descent(
    programs: Programs | None,
    method: Any,
    g: Loss,
    steps: int,
    rate: float,
    theta: Tree,
    x: Tree,
    batch: Tree,
) -> Tree:
    """Return x after ``steps`` steps of rate ``rate`` along −∇_x g on one batch.

    A compiled function takes several steps.
    """
    length = max(length for length in range(1, STEPS + 1) if steps % length == 0) if steps else 1
    block = form(
        programs, (f"{method.name} descent", g, rate, length), partial(_descent, g, rate, length)
    )
    for _ in range(0, steps, length):
        x = block(theta, x, batch)
    return x


def _descent(g: Loss, rate: float, steps: int, theta: Tree, x: Tree, batch: Tree) -> Tree:
    for _ in range(steps):
        grads, _value = gradient(g, theta, x, batch)
        x = descend(x, dict(zip(x, grads, strict=True)), rate)
    return x


def penalised_step(
    g: Loss,
    f: Loss,
    rate: float | Tensor,
    penalty: float | Tensor,
    theta: Tree,
    y: Tree,
    below: Tree,
    above: Tree,
) -> tuple[Tree, Tensor]:
    """Return y − (rate/penalty) ∇_y [f + penalty·g], and the lower loss at the old y."""
    lower = require_grad(y)
    with torch.enable_grad():
        at_y = g(theta, lower, below)
        (slope,) = gradients(f(theta, lower, above) / penalty + at_y, lower)
    return descend(y, slope, rate), at_y.detach()
