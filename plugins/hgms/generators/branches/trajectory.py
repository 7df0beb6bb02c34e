"""The iterates of one run as candidates.

IAPTT-GM truncates the run; HG-MS selects from it without a second run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, final

import torch
from attrs import evolve, field
from torch import Tensor

from hgms.config import lowering
from hgms.generators.branches.backward import Run
from hgms.generators.branches.replay import (
    KeepPath,
    Path,
    Replay,
    check_path,
    on_kept_graph,
    replays_of,
)
from hgms.optim import SGD, LowerOptimizer
from hgms_core import (
    Candidates,
    Cost,
    Key,
    Problem,
    State,
    Tree,
    clone,
    component,
    detach,
    repeat,
    stack,
)
from hgms_core.capabilities import Capabilities, LearnsStart
from hgms_core.trees import require_grad
from hgms_core.validators import optional_positive, positive


@final
@component
class Trajectory:
    """The iterates of one run of K steps of an optimiser on the lower loss, N = ⌈K / ``every``⌉
    candidates::

        y_0 = z if the start is learned (``learn_start``), else the carried state
        y_{k+1} = y_k − lr · direction(∇_y g(θ, y_k; B_k)),    candidates y_every, y_2·every, …, y_K

    Iterate y_k is replayed, and differentiated, through its k steps only. The optimiser's moments
    start at zero in every outer step.

    Use for IAPTT-GM (selector ``worst``, hypergradient ``unrolled``, a learned start), or to draw
    HG-MS's candidates from one run (``best-of-n``). Avoid when N independent samples of the set of
    minimisers are wanted: iterates of one run are similar.

    Parameters
    ----------
    steps
        K.
    every
        Keep each ``every``-th iterate, and the last.
    optimizer
        As in ``branches``; its moments and its schedule start again in each outer step.
    batch_size
        Examples per step; None uses all.
    carry_rule
        Start of the next outer step: the ``selected`` or the ``last`` iterate. No effect with a
        learned start.
    keep_path
        Keep the run while proposing, so that ``unrolled`` does not replay it: saves up to K lower
        gradients per outer step. ``graph`` keeps K graphs of a gradient, ``states`` keeps K states,
        for a backward pass in mixed mode. Only for ``unrolled``.

    Notes
    -----
    Cost: K lower gradients. Memory: N + 1 lower states, and the moments of one state; with
    ``keep_path`` K graphs of a gradient, or K more states.

    Source: Liu, Liu, Zeng, Zhang, *Towards gradient-based bilevel optimization with non-convex
    followers and beyond*, NeurIPS 2021 (arXiv 2110.00455).

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.full((1,), 4.0)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> trajectory = Trajectory(steps=3, optimizer=SGD(lr=0.25))
    >>> trajectory.propose(problem, problem.theta0, trajectory.init(problem, Key(0)), Key(0)).x[
    ...     "x"
    ... ].flatten()
    tensor([2.0000, 1.0000, 0.5000])
    """

    name: ClassVar[str] = "trajectory"
    capabilities: ClassVar[Capabilities] = frozenset({LearnsStart})

    steps: int = field(default=20, validator=positive)
    every: int = field(default=1, validator=positive)
    optimizer: LowerOptimizer = field(factory=SGD)
    batch_size: int | None = field(default=None, validator=optional_positive)
    carry_rule: Literal["selected", "last"] = "selected"
    keep_path: KeepPath = "none"

    memory_hints = lowering(other=["batch_size"])

    def __attrs_post_init__(self) -> None:
        check_path(self.keep_path, self.optimizer)

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        index = problem.lower_data.draw(key.fold("batches"), self.batch_size, self.steps)

        def path(steps: int, theta: Tree) -> Path:
            return self._path(problem, theta, start, index, steps)

        def path_to(index: Tensor, theta: Tree) -> Path:
            return path(self._candidate_steps[int(index)], theta)

        if self.keep_path == "none":
            still = detach(theta)
            x, losses = self._forward(path(self.steps, still), still)
            replay, mixed = replays_of(path_to, self.optimizer)
        else:
            leaves = require_grad(theta)
            x, losses, add_kept = self._keep(path(self.steps, leaves), leaves)
            replay, mixed = replays_of(path_to, self.optimizer, add_kept)
        rows = self.steps * problem.lower_data.count(self.batch_size)
        cost = Cost(lower_gradients=self.steps, rows=rows)
        return Candidates(x=x, losses=losses, cost=cost, replay=replay, replay_mixed=mixed)

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        return {
            "x": candidates.at(index if self.carry_rule == "selected" else candidates.count - 1)
        }

    def _forward(self, path: Path, theta: Tree) -> tuple[Tree, Tensor]:
        """Run without a graph; return (candidates, loss before the last step of each)."""
        if (run := path.run_compiled(theta)) is not None:
            return self._candidates(run)
        path = evolve(path, x=clone(path.x))
        x = repeat(path.x, len(self._candidate_steps))
        losses = next(iter(path.x.values())).new_empty(len(self._candidate_steps))
        done = 0
        for row, step in enumerate(self._candidate_steps):
            losses[row], memories = path.advance(theta, done, step, remember=True)
            path = evolve(path, moments=memories[0]) if memories else path
            for name, leaf in path.x.items():
                x[name][row] = leaf
            done = step
        return x, losses

    def _keep(self, path: Path, leaves: Tree) -> tuple[Tree, Tensor, Callable[[Replay], Replay]]:
        """Run and keep the graph or the states.

        Return (candidates, losses, function that adds the kept run to a replay).
        """
        steps = self._candidate_steps
        kept = path.run_and_keep(leaves, self.steps, mixed=self.keep_path == "states")
        if kept is not None:
            ends = [kept.end(step) for step in steps]
            add_kept = partial(on_kept_graph, ends, steps, leaves, path.rows)
            return *self._candidates(kept), add_kept
        run = enumerate(path.points(leaves, self.steps), start=1)
        points = [(x, loss) for step, ((x, _), loss) in run if step in steps]
        x = {name: torch.stack([point[name].detach() for point, _ in points]) for name in path.x}
        ends = [point for point, _ in points]
        add_kept = partial(on_kept_graph, ends, steps, leaves, path.rows)
        return x, torch.stack([loss for _, loss in points]), add_kept

    def _candidates(self, run: Run) -> tuple[Tree, Tensor]:
        points = [run.points[step][0] for step in self._candidate_steps]
        return stack(points), torch.stack([run.losses[step - 1] for step in self._candidate_steps])

    @property
    def _candidate_steps(self) -> list[int]:
        """Return the steps after which a candidate is taken."""
        return [*range(self.every, self.steps, self.every), self.steps]

    def _path(
        self, problem: Problem, theta: Tree, start: State, index: Tensor | None, steps: int
    ) -> Path:
        x = dict(start["x"]) if problem.start is None else problem.start(theta)
        rule = self.optimizer.rule(problem.x0)
        first = {"optimizer_steps": 0, "lower_steps": 0}
        rates = self.optimizer.rates(problem.x0, [1.0], self.steps, first)
        return Path(
            loss=problem.g,
            rule=rule,
            problem=problem,
            x=x,
            moments=rule.no_moments(x),
            index=index,
            rates=rates[:steps],
            decays=[self.optimizer.decay],
            rows=problem.lower_data.count(self.batch_size),
        )
