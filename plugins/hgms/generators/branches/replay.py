"""Replay of one run as a differentiable function of θ: the backward pass through a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from hgms.generators.branches.backward import Run, compiled_run, with_backward
from hgms.generators.branches.mixed_mode import mixed_run
from hgms.generators.branches.steps import Course, Point
from hgms.optim import Clip, LowerOptimizer, Torch
from hgms.optim.torch_rule import TorchRule
from hgms_core import ConfigError, Cost, LastStep, Tree, detach
from hgms_core.trees import require_grad

Replay = Callable[[Tensor, Tree, int | None], tuple[Tree, Cost]]
"""The type of ``replay`` in :class:`hgms_core.Candidates`: (index, θ, last) → (candidate, cost)."""

KeepPath = Literal["none", "graph", "states"]
"""What a generator keeps of a run for the replay."""


def is_of_torch(optimizer: LowerOptimizer) -> bool:
    """Return whether the optimiser is a torch optimiser, whose steps have no derivative."""
    inner = optimizer.optimizer if isinstance(optimizer, Clip) else optimizer
    return isinstance(inner, Torch)


def check_path(keep_path: KeepPath, optimizer: LowerOptimizer) -> None:
    """Raise ConfigError if the run of a torch optimiser should be kept."""
    if keep_path != "none" and is_of_torch(optimizer):
        raise ConfigError(
            "conflicting-options",
            f"keep_path={keep_path!r} requires the optimizer 'sgd' or 'adamw', but the generator "
            "has 'torch'",
            place=("keep_path",),
            hint="change the optimizer",
        )


@frozen(eq=False)
class Path(Course):
    """A run that can be repeated, also as a differentiable function of θ."""

    def points(self, theta: Tree, last: int) -> Iterator[tuple[Point, Tensor]]:
        """Yield (x and moments after each step, loss before the step).

        The ``last`` steps are differentiable in ``theta``; earlier steps keep no graph. Memory:
        ``last`` graphs of a gradient.
        """
        still = detach(theta)
        point: Point = (self.x, self.moments)
        for step in range(len(self.rates)):
            graph = step >= len(self.rates) - last
            upper = theta if graph else still
            point, loss = self.take(upper, point, self.batch(step), self.numbers(step), graph)
            yield point, loss

    def run_compiled(self, theta: Tree) -> Run | None:
        """Return the run by compiled functions, or None if it is not compiled."""
        if isinstance(self.rule, TorchRule):
            return None
        return compiled_run(self, self.rule, theta)

    def run_and_keep(self, theta: Tree, graphs: int, mixed: bool) -> Run | None:
        """Return the run with the data for a backward pass through its last ``graphs`` steps.

        This backward pass goes step by step, in mixed mode if ``mixed``. Return None if these steps
        have a graph instead.
        """
        steps = len(self.rates)
        if not mixed or not graphs or isinstance(self.rule, TorchRule):
            return self.run_compiled(theta) if graphs in (0, steps) else None
        return mixed_run(self, self.rule, theta, first=steps - graphs)

    def replay(self, theta: Tree, last: int | None, mixed: bool = False) -> tuple[Tree, Cost]:
        """Return the end of the run, and the cost of the forward and backward pass.

        ``mixed``: the backward pass uses mixed-mode differentiation, not a graph of the run.
        """
        steps = len(self.rates)
        graphs = count_graphs(theta, last, len(self.rates))
        end = self.x
        if (run := self.run_and_keep(theta, graphs, mixed)) is not None:
            end = run.end(len(run.steps))
        else:
            for (end, _), _ in self.points(theta, graphs):  # noqa: B007
                pass
        rows = self.rows * (steps + 2 * graphs)
        return end, Cost(lower_gradients=steps, products=graphs, cross_products=graphs, rows=rows)

    def keep(
        self, theta: Tree, mixed: bool
    ) -> tuple[Tree, Tree, Tensor, Callable[[Replay], Replay]]:
        """Run once and keep the graph for the replay, or the states if ``mixed``.

        Return the end as the only candidate (x, moments, loss), and a function that adds the kept
        run to a replay.
        """
        leaves = require_grad(theta)
        steps = len(self.rates)
        if (run := self.run_and_keep(leaves, steps, mixed)) is not None:
            end = run.end(steps)
            kept = run.points[-1][1]
            loss = run.losses[-1]
        else:
            *_, ((end, kept), loss) = self.points(leaves, steps)
        x = {name: leaf.detach()[None] for name, leaf in end.items()}
        moments = {name: leaf.detach()[None] for name, leaf in kept.items()}
        add_kept = partial(on_kept_graph, [end], [steps], leaves, self.rows)
        return x, moments, loss[None], add_kept

    def last_step(self, theta: Tree) -> LastStep:
        """Return the inputs of the last step. The steps before it run in place, without a graph."""
        before = len(self.rates) - 1
        self.advance(detach(theta), 0, before)
        batch = self.batch(before)
        cost = Cost(lower_gradients=before, rows=before * self.rows)
        rate = self.rates[before][0]
        return LastStep(x=self.x, batch=batch, rows=self.rows, rate=rate, cost=cost)


def replays_of(
    path: Callable[[Tensor, Tree], Path],
    optimizer: LowerOptimizer,
    add_kept: Callable[[Replay], Replay] = lambda replay: replay,
) -> tuple[Replay | None, Replay | None]:
    """Return ``replay`` and ``replay_mixed`` of candidates that are the ends of ``path(index, θ)``.

    Both are None for torch optimisers. ``add_kept`` adds a kept run (:func:`on_kept_graph`).
    """
    if is_of_torch(optimizer):
        return None, None

    def replay(mixed: bool, index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
        return path(index, theta).replay(theta, last, mixed)

    return add_kept(partial(replay, False)), add_kept(partial(replay, True))


def count_graphs(theta: Tree, last: int | None, steps: int) -> int:
    """Return how many of the last steps a replay differentiates: 0 if no leaf of θ requires a
    gradient.
    """
    if not any(leaf.requires_grad for leaf in theta.values()):
        return 0
    return steps if last is None else min(last, steps)


def on_kept_graph(
    ends: list[Tree], steps: list[int], leaves: Tree, rows: int, run_again: Replay
) -> Replay:
    """Return the replay of candidates ``ends`` through existing graphs from ``leaves``.

    ``steps`` contains the number of steps of each graph. An existing graph covers the whole run,
    for one θ. For another θ, or a truncated pass, ``run_again`` computes the candidate.
    """
    versions = [leaf._version for leaf in leaves.values()]

    def same(theta: Tree) -> bool:
        if versions != [leaf._version for leaf in leaves.values()]:
            return False  # changed in place since, so the original values are lost
        # Tensors that share memory are equal; skip the comparison of values.
        return all(
            theta[name].is_set_to(leaf) or torch.equal(theta[name], leaf)
            for name, leaf in leaves.items()
        )

    def replay(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
        if last is not None or not same(theta):
            return run_again(index, theta, last)
        chosen = 0 if len(ends) == 1 else int(index)

        def back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            # Retain the graph for a second backward pass (two losses of one state).
            return torch.autograd.grad(
                list(ends[chosen].values()),
                list(leaves.values()),
                grads,
                retain_graph=True,
                materialize_grads=True,
            )

        end = with_backward(ends[chosen], back, [theta[name] for name in leaves])
        graphs = count_graphs(theta, None, steps[chosen])
        return end, Cost(products=graphs, cross_products=graphs, rows=2 * graphs * rows)

    return replay
