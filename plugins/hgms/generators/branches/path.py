"""One run again, as a differentiable function of θ: the way back through a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from hgms.generators.branches.backward import Run, compiled_run
from hgms.generators.branches.differentiable import differentiable_step
from hgms.generators.branches.mixed_mode import mixed_run
from hgms.generators.branches.rule import Rule
from hgms.generators.branches.steps import advance, pieces, slope_of
from hgms.generators.branches.torch_rule import TorchRule, advance_torch
from hgms_core import Cost, Group, LastStep, Problem, Tree, clone, detach

Replay = Callable[[Tensor, Tree, int | None], tuple[Tree, Cost]]
"""What :class:`hgms_core.Candidates` holds as ``replay``: (index, θ, last) to the candidate, and
its cost.
"""


@frozen(eq=False)
class Path:
    """A run of one step for each rate: where it starts, its moments, and the numbers of the rows of
    each step (None: all); ``accumulate``: batches of a step; ``mixed``: gone back through by
    mixed-mode differentiation. With an optimiser of torch, rates and decay are factors on its own.
    """

    rule: Rule | TorchRule
    problem: Problem
    x: Tree
    moments: Tree
    index: Tensor | None
    rates: list[float]
    decay: float
    rows: int
    accumulate: int = 1
    mixed: bool = False

    def states(self, theta: Tree, last: int) -> Iterator[tuple[list[Tree], Tensor]]:
        """After each step [x, and what the rule remembers], and the loss before it.

        The ``last`` steps are differentiable in ``theta``, those before keep no graph. Memory:
        ``last`` graphs of a gradient.
        """
        still = detach(theta)
        state = [self.x, *self.rule.parts(self.moments, list(self.x))]
        for step, rate in enumerate(self.rates):
            graph = step >= len(self.rates) - last
            numbers = self.rule.numbers(step, rate, self.decay)
            upper = theta if graph else still
            batches = pieces(self.problem.lower_data, self._rows(step), self.accumulate)
            state, loss = differentiable_step(
                self.problem.g, self.rule, upper, state, batches, numbers, graph
            )
            yield state, loss

    def compiled(self, theta: Tree) -> Run | None:
        """The run by programs; None where it is not compiled."""
        if isinstance(self.rule, TorchRule) or self.accumulate > 1:
            return None
        moments = self.rule.parts(self.moments, list(self.x))
        return compiled_run(
            self.problem,
            theta,
            self.rule,
            self.x,
            moments,
            self.index,
            self.rates,
            self.decay,
            self.rows,
        )

    def kept(self, theta: Tree, graphs: int) -> Run | None:
        """The run with what it takes to go back through its last ``graphs`` steps one after the
        other; None where these have a graph instead."""
        steps = len(self.rates)
        if not self.mixed or not graphs or isinstance(self.rule, TorchRule):
            return self.compiled(theta) if graphs in (0, steps) else None
        numbers = [
            self.rule.numbers(step, rate, self.decay) for step, rate in enumerate(self.rates)
        ]
        moments = self.rule.parts(self.moments, list(self.x))
        first = steps - graphs
        return mixed_run(
            self.problem,
            theta,
            self.rule,
            self.x,
            moments,
            self.index,
            numbers,
            self.accumulate,
            first,
        )

    def replay(self, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
        """The end of the run, and the cost of going there and back."""
        steps = len(self.rates)
        graphs = differentiated(theta, last, len(self.rates))
        end = self.x
        calls = steps * self.accumulate
        if graphs and isinstance(self.rule, TorchRule):
            self.rule.check_differentiable()
        if not graphs and isinstance(self.rule, TorchRule):
            run_again = evolve(self, x=clone(self.x))
            calls = run_again._run(detach(theta), steps) * self.accumulate
            end = run_again.x
        elif (run := self.kept(theta, graphs)) is not None:
            end = run.end(len(run.steps))
        else:
            for (end, *_), _ in self.states(theta, graphs):  # noqa: B007
                pass
        products = graphs * self.accumulate
        rows = self.rows * (calls // self.accumulate + 2 * graphs)
        return end, Cost(
            lower_gradients=calls, products=products, cross_products=products, rows=rows
        )

    def with_graph(self, theta: Tree, run_again: Replay) -> tuple[Tree, Tree, Tensor, Replay]:
        """The end as the only candidate: x, moments and loss, and its replay through the graph
        of this run, which is kept.
        """
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
        steps = len(self.rates)
        if isinstance(self.rule, TorchRule):
            self.rule.check_differentiable()
        if (run := self.kept(leaves, steps)) is not None:
            end = run.end(steps)
            kept = run.states[-1][1:]
            loss = run.losses[-1]
        else:
            *_, ((end, *kept), loss) = self.states(leaves, steps)
        x = {name: leaf.detach()[None] for name, leaf in end.items()}
        moments = {name: leaf.detach()[None] for name, leaf in self.rule.joined(kept).items()}
        return (
            x,
            moments,
            loss[None],
            on_kept_graph([end], [steps], leaves, self.rows, run_again, self.accumulate),
        )

    def last_step(self, theta: Tree) -> LastStep:
        """How the last step is taken: those before it are run in place, without a graph."""
        before = len(self.rates) - 1
        self._run(detach(theta), before)
        batch = self.problem.lower_data.batch(self._rows(before))
        cost = Cost(lower_gradients=before * self.accumulate, rows=before * self.rows)
        return LastStep(x=self.x, batch=batch, rows=self.rows, rate=self.rates[before], cost=cost)

    def _run(self, theta: Tree, steps: int) -> int:
        """Takes the first steps in place, without a graph; how many gradients they took."""
        group = Group(0, self.x, self.problem.g)
        slope = slope_of(self.problem, theta, group, self.index, accumulate=self.accumulate)
        if isinstance(self.rule, TorchRule):
            factors = [[rate] for rate in self.rates[:steps]]
            return advance_torch(
                self.rule, group, self.moments, slope, factors, [self.decay], remember=False
            )[2]
        advance(self.rule, group, self.moments, slope, self.rates[:steps], self.decay)
        return steps

    def _rows(self, step: int) -> Tensor | None:
        return None if self.index is None else self.index[step]


def differentiated(theta: Tree, last: int | None, steps: int) -> int:
    """How many of the last steps a replay goes back through: none where no leaf of θ requires a
    gradient.
    """
    if not any(leaf.requires_grad for leaf in theta.values()):
        return 0
    return steps if last is None else min(last, steps)


def on_kept_graph(
    ends: list[Tree],
    steps: list[int],
    leaves: Tree,
    rows: int,
    run_again: Replay,
    accumulate: int = 1,
) -> Replay:
    """The replay of candidates ``ends`` whose graphs through ``steps`` steps from ``leaves`` are
    still there.

    A kept graph goes all the way, and is that of one θ: elsewhere the candidate is ``run_again``.
    """
    versions = [leaf._version for leaf in leaves.values()]

    def same(theta: Tree) -> bool:
        if versions != [leaf._version for leaf in leaves.values()]:
            return False  # changed in place since, so nobody knows what they held
        # Of the same memory nothing is read.
        return all(
            theta[name].is_set_to(leaf) or torch.equal(theta[name], leaf)
            for name, leaf in leaves.items()
        )

    def replay(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
        if last is not None or not same(theta):
            return run_again(index, theta, last)
        chosen = 0 if len(ends) == 1 else int(index)
        outputs = _Standing.apply(
            list(ends[chosen].values()), list(leaves.values()), *(theta[name] for name in leaves)
        )
        graphs = differentiated(theta, None, steps[chosen])
        end = dict(zip(ends[chosen], cast("tuple[Tensor, ...]", outputs), strict=True))
        products = graphs * accumulate
        return end, Cost(products=products, cross_products=products, rows=2 * graphs * rows)

    return replay


class _Standing(torch.autograd.Function):
    """The outputs of a graph that exists already, as a function of other leaves that stand for
    its inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: list[Tensor], inputs: list[Tensor], *stand_ins: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.graph = (outputs, inputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        outputs, inputs = ctx.graph
        # Kept, so that whoever goes back twice (two losses of one state) finds it still there.
        return (
            None,
            None,
            *torch.autograd.grad(outputs, inputs, grads, retain_graph=True, materialize_grads=True),
        )
