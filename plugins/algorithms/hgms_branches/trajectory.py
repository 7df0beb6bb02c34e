"""The iterates of one run as candidates: what IAPTT-GM truncates, and what HG-MS can select from without a second run."""

from __future__ import annotations

from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms_branches.back import Run
from hgms_branches.path import Path, Replay, on_kept_graph
from hgms_branches.rule import Rule
from hgms_branches.steps import advance, slope_of
from hgms_core import Candidates, Cost, Group, Key, Problem, State, Tree, choice, detach, repeat, stack
from hgms_fields import (
    decay_rate,
    decay_rates,
    frozen,
    lowering,
    not_negative,
    optional_positive,
    optional_whole,
    positive,
    whole,
)


@final
@frozen(kw_only=True)
class Trajectory:
    """The iterates of one run of K steps of SGD or AdamW on the lower loss, N = ⌈K / ``every``⌉ candidates::

        y_0 = z where the start is learned (``learn_start``), else the carried state
        y_{k+1} = y_k − lr · direction(∇_y g(θ, y_k; B_k)),        candidates y_every, y_2·every, …, y_K

    A candidate is replayed, and differentiated, through its own k steps only. The optimiser's moments start at zero in every
    outer step.

    Use for IAPTT-GM (selector ``worst``, hypergradient ``unrolled``, a learned start), or to draw HG-MS's candidates from one
    run (``best-of-n``). Avoid when N independent views of the set of minimisers are wanted: iterates of one run are alike.

    Arguments:
        steps: K. ``every``: keep each ``every``-th iterate, and the last.
        optimizer, lr, momentum, betas, eps, weight_decay: as in ``branches`` (decoupled decay). ``clip``: bound on ‖∇_y g‖.
        batch_size: examples a step; None uses all.
        carry_rule: the next outer step starts from the ``selected`` iterate, from the ``last`` one, or from a newly drawn
            lower state (``restart``). Without effect on a learned start.
        keep_graph: build the run's graph while proposing, so that ``unrolled`` need not run it again: saves up to K lower
            gradients an outer step. Only for ``unrolled``, and for runs whose K graphs fit into memory.

    Cost: K lower gradients. Memory: N + 1 lower states and moments for one; with ``keep_graph`` K graphs of a gradient.

    >>> problem = Problem(theta0={"t": torch.zeros(1)}, x0={"x": torch.full((1,), 4.0)},
    ...                   g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(), f=lambda t, x, _: x["x"].sum())
    >>> trajectory = Trajectory(steps=3, lr=0.25)
    >>> trajectory.propose(problem, problem.theta0, trajectory.init(problem, Key(0)), Key(0)).x["x"].flatten()
    tensor([2.0000, 1.0000, 0.5000])

    Source: Liu, Liu, Zeng, Zhang, *Towards gradient-based bilevel optimization with non-convex followers and beyond*, NeurIPS
    2021 (arXiv 2110.00455).
    """

    name: ClassVar[str] = "trajectory"
    can_learn_start: ClassVar[bool] = True

    steps: int = field(default=20, validator=whole)
    every: int = field(default=1, validator=whole)
    optimizer: Literal["sgd", "adamw"] = field(default="sgd", validator=choice("sgd", "adamw"))
    lr: float = field(default=0.1, validator=positive)
    momentum: float = field(default=0.0, validator=decay_rate)
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    clip: float | None = field(default=None, validator=optional_positive)
    batch_size: int | None = field(default=None, validator=optional_whole)
    carry_rule: Literal["selected", "last", "restart"] = field(
        default="selected", validator=choice("selected", "last", "restart")
    )
    keep_graph: bool = False

    lighter = lowering(other=["batch_size"])

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        index = problem.lower_data.draw(key.fold("batches"), self.batch_size, self.steps)

        def path(theta: Tree, steps: int) -> Path:
            return self._path(problem, theta, start, index, steps)

        def run_again(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
            return path(theta, self._kept[int(index)]).replay(theta, last)

        if self.keep_graph:
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
            x, losses, replay = self._with_graph(path(leaves, self.steps), leaves, run_again)
        else:
            (x, losses), replay = self._forward(path(detach(theta), self.steps), detach(theta)), run_again
        rows = problem.lower_data.count(self.batch_size)
        return Candidates(x=x, losses=losses, cost=Cost(lower_gradients=self.steps, rows=self.steps * rows), replay=replay)

    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        if self.carry_rule == "restart":
            return {"x": dict(problem.initial(key))}
        return {"x": candidates.at(index if self.carry_rule == "selected" else candidates.count - 1)}

    def _forward(self, path: Path, theta: Tree) -> tuple[Tree, Tensor]:
        """The candidates and the loss before the last step of each, without a graph."""
        if (run := path.compiled(theta)) is not None:
            return self._candidates(run)
        point = {name: leaf.detach().clone() for name, leaf in path.x.items()}
        x, first = repeat(point, len(self._kept)), next(iter(point.values()))
        losses, done = torch.empty(len(self._kept), dtype=first.dtype, device=first.device), 0
        group = Group(0, point, path.problem.g)
        for row, step in enumerate(self._kept):
            slope = slope_of(path.problem, theta, group, None if path.index is None else path.index[done:step])
            losses[row] = advance(Rule.of(self, done), group, path.moments, slope, path.rates[done:step], self.weight_decay)
            for name, leaf in point.items():
                x[name][row] = leaf
            done = step
        return x, losses

    def _with_graph(self, path: Path, leaves: Tree, run_again: Replay) -> tuple[Tree, Tensor, Replay]:
        """The same, with the graph that a replay then goes back through."""
        if (compiled := path.compiled(leaves)) is not None:
            ends = [compiled.end(step) for step in self._kept]
            return *self._candidates(compiled), on_kept_graph(ends, self._kept, leaves, path.rows, run_again)
        run = enumerate(path.states(leaves, self.steps), start=1)
        points = [(state[0], loss) for step, (state, loss) in run if step in self._kept]
        x = {name: torch.stack([point[name].detach() for point, _ in points]) for name in path.x}
        replay = on_kept_graph([point for point, _ in points], self._kept, leaves, path.rows, run_again)
        return x, torch.stack([loss for _, loss in points]), replay

    def _candidates(self, run: Run) -> tuple[Tree, Tensor]:
        points = [run.states[step][0] for step in self._kept]
        return stack(points), torch.stack([run.losses[step - 1] for step in self._kept])

    @property
    def _kept(self) -> list[int]:
        """After which steps a candidate is taken."""
        return [*range(self.every, self.steps, self.every), self.steps]

    def _path(self, problem: Problem, theta: Tree, start: State, index: Tensor | None, steps: int) -> Path:
        x = dict(start["x"]) if problem.start is None else problem.start(theta)
        return Path(
            rule=Rule.of(self),
            problem=problem,
            x=x,
            moments=Rule.of(self).no_moments(x),
            index=index,
            rates=[self.lr] * steps,
            decay=self.weight_decay,
            rows=problem.lower_data.count(self.batch_size),
        )
