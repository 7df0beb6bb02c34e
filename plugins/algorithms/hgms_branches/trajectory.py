"""The iterates of one run as candidates: what IAPTT-GM truncates, and what HG-MS can select from without a second run."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import torch
from attrs import field, frozen, validators
from torch import Tensor

from hgms_branches.update import Hyper, advance, differentiated, holds_values_of, iterates, stood_in, unrolled
from hgms_core import Candidates, Cost, Group, Key, Problem, State, Tree, choice, detach, repeat

positive: Any = validators.gt(0)
whole: Any = [validators.instance_of(int), validators.gt(0)]
not_negative: Any = validators.ge(0)


def _decay_rates(instance: object, attribute: object, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"'betas' must be two numbers in [0, 1): {value}")


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
    momentum: float = field(default=0.0, validator=[not_negative, validators.lt(1)])
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    clip: float | None = field(default=None, validator=validators.optional(positive))
    batch_size: int | None = field(default=None, validator=validators.optional(whole))
    carry_rule: Literal["selected", "last", "restart"] = field(
        default="selected", validator=choice("selected", "last", "restart")
    )
    keep_graph: bool = False

    def init(self, problem: Problem, key: Key) -> State:
        return {"x": dict(problem.x0)}

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        rows = problem.lower_data.count(self.batch_size)
        cost = Cost(lower_gradients=self.steps, rows=self.steps * rows)
        index = problem.lower_data.draw(key.fold("batches"), self.batch_size, self.steps)
        if self.keep_graph:
            return self._with_graph(problem, theta, start, key, index, cost)
        first = self._first(problem, theta, start)
        theta, point = detach(theta), {name: leaf.detach().clone() for name, leaf in first.items()}
        x, moments = repeat(point, len(self._kept)), self._no_moments(point)
        losses = torch.empty(len(self._kept), dtype=next(iter(x.values())).dtype, device=next(iter(x.values())).device)
        done = 0
        for row, step in enumerate(self._kept):
            rates: list[float | Tensor] = [self.lr] * (step - done)
            drawn = None if index is None else index[done:step]
            losses[row] = advance(
                self._hyper(done),
                Group(0, point, problem.g),
                theta,
                moments,
                problem.lower_data,
                drawn,
                rates,
                self.weight_decay,
            )
            for name, leaf in point.items():
                x[name][row] = leaf
            done = step
        return Candidates(x=x, losses=losses, cost=cost)

    def replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        steps = self._kept[int(index)]
        within = differentiated(theta, last, steps)
        drawn = problem.lower_data.draw(key.fold("batches"), self.batch_size, self.steps)
        x = self._first(problem, theta, start)
        rates = [self.lr] * steps
        end = unrolled(self._hyper(0), problem, theta, x, self._no_moments(x), drawn, rates, self.weight_decay, within)
        rows = problem.lower_data.count(self.batch_size) * (steps + 2 * within)
        return end, Cost(lower_gradients=steps, products=within, cross_products=within, rows=rows)

    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        if self.carry_rule == "restart":
            return {"x": dict(problem.initial(key))}
        return {"x": candidates.at(index if self.carry_rule == "selected" else candidates.count - 1)}

    def _with_graph(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor | None, cost: Cost
    ) -> Candidates:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
        first = self._first(problem, leaves, start)
        run = iterates(
            self._hyper(0),
            problem,
            leaves,
            first,
            self._no_moments(first),
            index,
            [self.lr] * self.steps,
            self.weight_decay,
            self.steps,
        )
        seen = [(state[0], loss) for step, (state, loss) in enumerate(run, start=1) if step in self._kept]
        rows = problem.lower_data.count(self.batch_size)
        same = holds_values_of(leaves)

        def again(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
            if last is not None or not same(theta):  # the kept graph goes all the way, and is that of one θ
                return self.replay(problem, theta, start, key, index, last)
            chosen = int(index)
            back = differentiated(theta, None, self._kept[chosen])
            end = stood_in(seen[chosen][0], leaves, theta)
            return end, Cost(products=back, cross_products=back, rows=2 * back * rows)

        x = {name: torch.stack([point[name].detach() for point, _ in seen]) for name in first}
        return Candidates(x=x, losses=torch.stack([loss for _, loss in seen]), cost=cost, replay=again)

    @property
    def _kept(self) -> list[int]:
        """After which steps a candidate is taken."""
        return [*range(self.every, self.steps, self.every), self.steps]

    def _first(self, problem: Problem, theta: Tree, start: State) -> Tree:
        return dict(start["x"]) if problem.start is None else problem.start(theta)

    def _hyper(self, done: int) -> Hyper:
        return Hyper(self.optimizer, self.momentum, self.betas, self.eps, self.clip, done)

    def _no_moments(self, x: Tree) -> Tree:
        kinds = ("m", "v") if self.optimizer == "adamw" else ("m",) if self.momentum else ()
        return {f"{kind}.{name}": torch.zeros_like(leaf) for kind in kinds for name, leaf in x.items()}
