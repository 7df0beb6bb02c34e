"""One run again, as a differentiable function of θ: the way back through a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from hgms_branches.back import Run, compiled_run
from hgms_branches.differentiable import differentiable_step
from hgms_branches.steps import Coefficients, Rule, advance, slope_of
from hgms_core import Cost, Group, LastStep, Problem, Tree, detach

Replay = Callable[[Tensor, Tree, int | None], tuple[Tree, Cost]]
"""What :class:`hgms_core.Candidates` holds as ``replay``: (index, θ, last) to the candidate, and its cost."""


@frozen(eq=False)
class Path:
    """A run of one step for each rate: where it starts, its moments, and the numbers of the rows of each step (None: all)."""

    rule: Rule
    problem: Problem
    x: Tree
    moments: Tree
    index: Tensor | None
    rates: list[float]
    decay: float
    rows: int

    def states(self, theta: Tree, last: int) -> Iterator[tuple[list[Tree], Tensor]]:
        """After each step [x, m, v], as far as there are moments, and the loss before it.

        The ``last`` steps are differentiable in ``theta``, those before keep no graph. Memory: ``last`` graphs of a gradient.
        """
        still, state = detach(theta), [self.x, *self._moments]
        for step, rate in enumerate(self.rates):
            graph = step >= len(self.rates) - last
            numbers = Coefficients.of(self.rule, self.rule.done + step + 1, rate, self.decay)
            batch, upper = self._batch(step), theta if graph else still
            state, loss = differentiable_step(self.problem.g, self.rule, upper, state, batch, numbers, graph)
            yield state, loss

    def compiled(self, theta: Tree) -> Run | None:
        """The run by programs; None where it is not compiled."""
        how = (self.rule, self.x, self._moments, self.index, self.rates, self.decay, self.rows)
        return compiled_run(self.problem, theta, *how)

    def replay(self, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
        """The end of the run, and the cost of going there and back."""
        steps, graphs, end = len(self.rates), differentiated(theta, last, len(self.rates)), self.x
        if graphs in (0, steps) and (run := self.compiled(theta)) is not None:
            end = run.end(steps)
        else:
            for (end, *_), _ in self.states(theta, graphs):  # noqa: B007
                pass
        rows = self.rows * (steps + 2 * graphs)
        return end, Cost(lower_gradients=steps, products=graphs, cross_products=graphs, rows=rows)

    def with_graph(self, theta: Tree, run_again: Replay) -> tuple[Tree, Tree, Tensor, Replay]:
        """The end as the only candidate: x, moments and loss, and its replay through the graph of this run, which is kept."""
        leaves, steps = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}, len(self.rates)
        if (run := self.compiled(leaves)) is not None:
            end, kept, loss = run.end(steps), run.states[-1][1:], run.losses[-1]
        else:
            *_, ((end, *kept), loss) = self.states(leaves, steps)
        x = {name: leaf.detach()[None] for name, leaf in end.items()}
        moments = {f"{kind}.{name}": tree[name].detach()[None] for kind, tree in zip("mv", kept, strict=False) for name in x}
        return x, moments, loss[None], on_kept_graph([end], [steps], leaves, self.rows, run_again)

    def last_step(self, theta: Tree) -> LastStep:
        """How the last step is taken: those before it are run in place, without a graph."""
        before, group = len(self.rates) - 1, Group(0, self.x, self.problem.g)
        slope = slope_of(self.problem, detach(theta), group, self.index)
        advance(self.rule, group, self.moments, slope, self.rates[:before], self.decay)
        batch = self._batch(before)
        cost = Cost(lower_gradients=before, rows=before * self.rows)
        return LastStep(x=self.x, batch=batch, rows=self.rows, rate=self.rates[before], cost=cost)

    def _batch(self, step: int) -> Tree:
        return self.problem.lower_data.batch(None if self.index is None else self.index[step])

    @property
    def _moments(self) -> list[Tree]:
        names, moments = list(self.x), self.moments
        return [{name: moments[f"{kind}.{name}"] for name in names} for kind in "mv" if f"{kind}.{names[0]}" in moments]


def differentiated(theta: Tree, last: int | None, steps: int) -> int:
    """How many of the last steps a replay goes back through: none where no leaf of θ requires a gradient."""
    if not any(leaf.requires_grad for leaf in theta.values()):
        return 0
    return steps if last is None else min(last, steps)


def on_kept_graph(ends: list[Tree], steps: list[int], leaves: Tree, rows: int, run_again: Replay) -> Replay:
    """The replay of candidates ``ends`` whose graphs through ``steps`` steps from ``leaves`` are still there.

    A kept graph goes all the way, and is that of one θ: elsewhere the candidate is ``run_again``.
    """
    versions = [leaf._version for leaf in leaves.values()]

    def same(theta: Tree) -> bool:
        if versions != [leaf._version for leaf in leaves.values()]:
            return False  # changed in place since, so nobody knows what they held
        # Of the same memory nothing is read.
        return all(theta[name].is_set_to(leaf) or torch.equal(theta[name], leaf) for name, leaf in leaves.items())

    def replay(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
        if last is not None or not same(theta):
            return run_again(index, theta, last)
        chosen = 0 if len(ends) == 1 else int(index)
        outputs = _Standing.apply(list(ends[chosen].values()), list(leaves.values()), *(theta[name] for name in leaves))
        graphs = differentiated(theta, None, steps[chosen])
        end = dict(zip(ends[chosen], cast("tuple[Tensor, ...]", outputs), strict=True))
        return end, Cost(products=graphs, cross_products=graphs, rows=2 * graphs * rows)

    return replay


class _Standing(torch.autograd.Function):
    """The outputs of a graph that exists already, as a function of other leaves that stand for its inputs."""

    @staticmethod
    def forward(ctx: Any, outputs: list[Tensor], inputs: list[Tensor], *stand_ins: Tensor) -> tuple[Tensor, ...]:
        ctx.graph = (outputs, inputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outputs, inputs = ctx.graph
        # Kept, so that whoever goes back twice (two losses of one state) finds it still there.
        return None, None, *torch.autograd.grad(outputs, inputs, grads, retain_graph=True, materialize_grads=True)
