"""N runs of an ordinary optimiser from one start: the practical candidate generator of HG-MS."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field, frozen, validators
from torch import Tensor

from hgms_branches.update import (
    Hyper,
    advance,
    differentiated,
    gradient_on,
    holds_values_of,
    iterates,
    stood_in,
    unrolled,
)
from hgms_core import (
    Candidates,
    ConfigError,
    Cost,
    Group,
    Key,
    LastStep,
    Mode,
    Problem,
    State,
    Tree,
    choice,
    detach,
    groups,
    repeat,
)
from hgms_graphs import Recording, recorded

positive: Any = validators.gt(0)
whole: Any = [validators.instance_of(int), validators.gt(0)]
not_negative: Any = validators.ge(0)


def _spread(instance: object, attribute: object, value: tuple[float, float] | None) -> None:
    if value is not None and not 0 < value[0] <= value[1]:
        raise ValueError(f"a spread is two positive factors (low, high) with low <= high: {value}")


def _decay_rates(instance: object, attribute: object, value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        raise ValueError(f"'betas' must be two numbers in [0, 1): {value}")


@final
@frozen(kw_only=True)
class Branches:
    """N runs of SGD or AdamW on the lower loss, K steps each, from a common or an own start.

    Branch i, with its own batches B and step size η_i (SGD; AdamW has its usual form with decoupled decay)::

        y ← y_start + noise_i,    y ← y − η_i (∇_y g(θ, y; B) clipped + wd_i·y)      K times

    Branch 0 is always free of noise. The candidates differ through the order of the batches (``batches = "independent"``),
    noise at the start, and factors on learning rate and weight decay spaced evenly in the logarithm.

    Use when the lower level is a network that is trained by steps, not solved. Avoid when a temperature matters (``ula``).

    Arguments:
        count: N. ``steps``: K, lower updates of each branch in one outer step.
        optimizer, lr, momentum, betas, eps, weight_decay: as in torch.optim (decay is decoupled for both optimisers).
        batch_size: examples a step; None uses all. ``batches``: shared by all branches or drawn independently.
        noise: standard deviation of the Gaussian added to the start; in units of each leaf's root mean square if
            ``noise_scale = "relative"`` (a leaf that is all zero then gets none).
        lr_spread, decay_spread: (low, high) factors, log-spaced over the branches.
        clip: bound on the norm of a branch's gradient.
        schedule: ``constant``; ``cosine`` from lr to ``floor``·lr over the K steps; ``cosine-restarts`` over ``period`` lower
            steps, again and again, counted over the whole run.
        carry_rule: the next outer step starts all branches from the ``selected`` one, from the noise-free ``base`` (branch 0),
            each from its own end (``per-branch``), or from a newly drawn lower state (``restart``).
        restart_every: also draw a new lower state after this many outer steps (None: never), which forgets what the lower level
            has memorised.
        moments: ``carry`` lets the optimiser's moments travel with their weights, ``fresh`` starts them at zero each time.
        mode, chunk: stacked or looped evaluation (auto picks by size), and how many stacked branches at a time.
        keep_graph: with one branch, build its graph while proposing, so that ``unrolled`` need not run it again: saves K lower
            gradients an outer step. Only for ``unrolled``. Of several branches the selected one is run again all the same,
            so memory stays that of one.
        cuda_graphs: on a GPU, record the gradient of a lower step once and launch its kernels together afterwards: for losses
            so small that launching takes longer than computing. The same numbers; needs losses that can be recorded
            (:class:`hgms_graphs.Recording`). No effect on a CPU, nor with a tilt or a learned start.

    Cost: N·K lower gradients. Memory: with AdamW 4N lower states, with SGD 2N, and activations of ``chunk`` branches; with
    ``keep_graph`` and one branch K graphs of a gradient.

    >>> problem = Problem(theta0={"t": torch.zeros(1)}, x0={"x": torch.full((1,), 4.0)},
    ...                   g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(), f=lambda t, x, _: x["x"].sum())
    >>> branches = Branches(count=3, steps=50, lr=0.1, noise=1.0)
    >>> start = branches.init(problem, Key(0))
    >>> found = branches.propose(problem, problem.theta0, start, Key(0))
    >>> found.x["x"].shape, bool((found.x["x"].abs() < 1e-3).all())
    (torch.Size([3, 1]), True)

    Source: HG-MS paper, section "HG-MS" (finite-budget branch generator) and the experiment appendix.
    """

    name: ClassVar[str] = "branches"

    count: int = field(default=4, validator=whole)
    steps: int = field(default=20, validator=whole)
    optimizer: Literal["sgd", "adamw"] = field(default="sgd", validator=choice("sgd", "adamw"))
    lr: float = field(default=0.1, validator=positive)
    momentum: float = field(default=0.0, validator=[not_negative, validators.lt(1)])
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=_decay_rates)
    eps: float = field(default=1e-8, validator=positive)
    weight_decay: float = field(default=0.0, validator=not_negative)
    batch_size: int | None = field(default=None, validator=validators.optional(whole))
    batches: Literal["independent", "shared"] = field(default="independent", validator=choice("independent", "shared"))
    noise: float = field(default=0.0, validator=not_negative)
    noise_scale: Literal["absolute", "relative"] = field(default="absolute", validator=choice("absolute", "relative"))
    lr_spread: tuple[float, float] | None = field(default=None, validator=_spread)
    decay_spread: tuple[float, float] | None = field(default=None, validator=_spread)
    clip: float | None = field(default=None, validator=validators.optional(positive))
    schedule: Literal["constant", "cosine", "cosine-restarts"] = field(
        default="constant", validator=choice("constant", "cosine", "cosine-restarts")
    )
    floor: float = field(default=0.0, validator=[not_negative, validators.le(1)])
    period: int = field(default=20, validator=whole)
    carry_rule: Literal["selected", "base", "per-branch", "restart"] = field(
        default="selected", validator=choice("selected", "base", "per-branch", "restart")
    )
    restart_every: int | None = field(default=None, validator=validators.optional(positive))
    moments: Literal["carry", "fresh"] = field(default="carry", validator=choice("carry", "fresh"))
    mode: Mode = field(default="auto", validator=choice("auto", "stacked", "loop"))
    chunk: int | None = field(default=None, validator=validators.optional(whole))
    keep_graph: bool = False
    cuda_graphs: bool = False

    def init(self, problem: Problem, key: Key) -> State:
        x = repeat(problem.x0, self.count if self.carry_rule == "per-branch" else 1)
        return {"x": x, "moments": self._no_moments(x), "optimizer_steps": 0, "lower_steps": 0}

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        if self.keep_graph and self.count == 1:
            return self._with_graph(problem, theta, start, key)
        x, moments, index = self._begin(problem, start, key, list(range(self.count)))
        rates, decays = self._rates(start["lower_steps"]), self._factors(self.decay_spread)
        rows = problem.lower_data.count(self.batch_size)
        last = torch.empty(self.count, dtype=next(iter(x.values())).dtype, device=next(iter(x.values())).device)
        own_batch = self.batches == "independent" and index is not None
        theta = detach(theta)
        for group in groups(problem.g, x, own_batch=own_batch, rows=rows, mode=self.mode, chunk=self.chunk):
            last[group.part] = advance(
                self.hyper(start),
                group,
                theta,
                {name: leaf[group.part] for name, leaf in moments.items()},
                problem.lower_data,
                group.rows_of(index) if own_batch else index,
                [self._for_group(group, rate) for rate in rates],
                self._for_group(group, [self.weight_decay * factor for factor in decays]),
                self._recorded(problem, theta, group, group.rows_of(index) if own_batch else index),
            )
        calls = self.count * self.steps
        return Candidates(x=x, aux=moments, losses=last, cost=Cost(lower_gradients=calls, rows=calls * rows))

    def replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        within = differentiated(theta, last, self.steps)
        rows = problem.lower_data.count(self.batch_size) * (self.steps + 2 * within)
        cost = Cost(lower_gradients=self.steps, products=within, cross_products=within, rows=rows)
        return unrolled(*self._run(problem, theta, start, key, self._number(index)), within), cost

    def last_step(self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor) -> LastStep:
        """The last step of branch ``index``: the K − 1 steps before it are run again, without a graph."""
        self._check_linear()
        hyper, _, _, x, moments, drawn, rates, decay = self._run(problem, theta, start, key, self._number(index))
        rows = problem.lower_data.count(self.batch_size)
        before = self.steps - 1
        if before:
            group = Group(0, x, problem.g)
            advance(hyper, group, detach(theta), moments, problem.lower_data, drawn, list(rates[:before]), decay)
        batch = problem.lower_data.batch(None if drawn is None else drawn[before])
        cost = Cost(lower_gradients=before, rows=before * rows)
        return LastStep(x=x, batch=batch, rows=rows, rate=rates[before], cost=cost)

    def next_step(self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, x: Tree) -> LastStep:
        """One plain step more from ``x``, at the rate of the last one, on a batch of the same size drawn by ``key``."""
        self._check_linear()
        rate = self._rates(start["lower_steps"])[-1][0 if self.lr_spread is None else self._number(index)]
        data = problem.lower_data
        drawn = data.draw(key, self.batch_size, 1)
        return LastStep(x=x, batch=data.batch(None if drawn is None else drawn[0]), rows=data.count(self.batch_size), rate=rate)

    def _check_linear(self) -> None:
        if self.optimizer != "sgd" or self.clip is not None:
            raise ConfigError(
                'a step is linear in ∇g only with optimizer = "sgd" and no clip, and this generator has '
                f"optimizer = {self.optimizer!r}, clip = {self.clip}\n"
                "  change these, or use the hypergradient 'unrolled' with last = 1"
            )

    def _with_graph(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
        end, loss = list(iterates(*self._run(problem, leaves, start, key, 0), self.steps))[-1]
        rows = problem.lower_data.count(self.batch_size)
        same = holds_values_of(leaves)

        def again(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
            if last is not None or not same(theta):  # the kept graph goes all the way, and is that of one θ
                return self.replay(problem, theta, start, key, index, last)
            back = differentiated(theta, None, self.steps)
            return stood_in(end[0], leaves, theta), Cost(products=back, cross_products=back, rows=2 * back * rows)

        x = {name: leaf.detach().unsqueeze(0) for name, leaf in end[0].items()}
        aux = {f"{kind}.{name}": moment[name].detach()[None] for kind, moment in zip("mv", end[1:], strict=False) for name in x}
        cost = Cost(lower_gradients=self.steps, rows=self.steps * rows)
        return Candidates(x=x, aux=aux, losses=loss[None], cost=cost, replay=again)

    def _run(
        self, problem: Problem, theta: Tree, start: State, key: Key, chosen: int
    ) -> tuple[Hyper, Problem, Tree, Tree, Tree, Tensor | None, list[float], float]:
        """One branch from its start, as arguments of :func:`unrolled`."""
        x, moments, drawn = self._begin(problem, start, key, [chosen])
        if drawn is not None and self.batches == "independent":
            drawn = drawn[0]
        return (
            self.hyper(start),
            problem,
            theta,
            {name: leaf[0] for name, leaf in x.items()},
            {name: leaf[0] for name, leaf in moments.items()},
            drawn,
            [rate[chosen] for rate in self._rates(start["lower_steps"])],
            self.weight_decay * self._factors(self.decay_spread)[chosen],
        )

    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        outer_steps = start["lower_steps"] // self.steps + 1
        restart = self.carry_rule == "restart" or (self.restart_every is not None and outer_steps % self.restart_every == 0)
        if restart:
            x, moments = repeat(problem.initial(key), 1), {}
        elif self.carry_rule == "per-branch":
            x, moments = candidates.x, candidates.aux
        else:
            row = index.reshape(1) if self.carry_rule == "selected" else torch.zeros_like(index).reshape(1)
            x = {name: leaf.index_select(0, row) for name, leaf in candidates.x.items()}
            moments = {name: leaf.index_select(0, row) for name, leaf in candidates.aux.items()}
        fresh = restart or self.moments == "fresh"
        return {
            "x": x,
            "moments": self._no_moments(x) if fresh else moments,
            "optimizer_steps": 0 if fresh else start["optimizer_steps"] + self.steps,
            "lower_steps": start["lower_steps"] + self.steps,
        }

    def _recorded(self, problem: Problem, theta: Tree, group: Group, index: Tensor | None) -> Recording | None:
        if not self.cuda_graphs:
            return None
        step, device = gradient_on(group.loss, problem.lower_data), next(iter(group.x.values())).device
        first = None if index is None else index[..., 0, :]
        place = (group.part.start, group.part.stop) if isinstance(group.part, slice) else "one"
        return recorded(problem, (self, place), device, lambda: Recording(step, theta, group.x, first))

    def _number(self, index: Tensor) -> int:
        """A branch's number on the CPU, where its keys are made. Only one of several is worth waiting for."""
        return 0 if self.count == 1 else int(index)

    def hyper(self, start: State) -> Hyper:
        return Hyper(self.optimizer, self.momentum, self.betas, self.eps, self.clip, start["optimizer_steps"])

    def _no_moments(self, x: Tree) -> Tree:
        kinds = ("m", "v") if self.optimizer == "adamw" else ("m",) if self.momentum else ()
        return {f"{kind}.{name}": torch.zeros_like(leaf) for kind in kinds for name, leaf in x.items()}

    def _begin(self, problem: Problem, start: State, key: Key, members: list[int]) -> tuple[Tree, Tree, Tensor | None]:
        """Starts, moments and batch numbers of some branches: a function of the arguments alone, so one can be replayed."""
        rows = start["x"]
        carried = next(iter(rows.values())).shape[0]
        if carried not in (1, self.count):
            raise ConfigError(f"the carried state holds {carried} branches, this generator has count = {self.count}")

        def own_copies(tree: Tree) -> Tree:
            # By views of rows: a list of row numbers would go to the device, and the GPU be waited for.
            if carried == 1:
                return repeat({name: leaf[0] for name, leaf in tree.items()}, len(members))
            return {name: torch.stack([leaf[member] for member in members]) for name, leaf in tree.items()}

        x, moments = own_copies(rows), own_copies(start["moments"])
        if self.noise:
            for row, member in enumerate(members):
                if member == 0:
                    continue  # branch 0 is the noise-free parent
                device = next(iter(x.values())).device
                generator = key.fold("noise", member).generator(device)
                for leaf in x.values():
                    scale = leaf[row].square().mean().sqrt() if self.noise_scale == "relative" else 1.0
                    drawn = torch.randn(leaf[row].shape, generator=generator, dtype=leaf.dtype, device=leaf.device)
                    leaf[row] += self.noise * scale * drawn
        data = problem.lower_data
        if self.batches == "shared":
            return x, moments, data.draw(key.fold("batches"), self.batch_size, self.steps)
        own = [data.draw(key.fold("batches", member), self.batch_size, self.steps) for member in members]
        return x, moments, None if own[0] is None else torch.stack([each for each in own if each is not None])

    def _factors(self, spread: tuple[float, float] | None) -> list[float]:
        if spread is None or self.count == 1:
            return [1.0] * self.count
        low, high = spread
        return [low * (high / low) ** (i / (self.count - 1)) for i in range(self.count)]

    def _rates(self, lower_steps: int) -> list[list[float]]:
        """Learning rate of every branch at each of the K steps."""
        factors = self._factors(self.lr_spread)
        return [[self.lr * factor * self._shape(lower_steps, step) for factor in factors] for step in range(self.steps)]

    def _shape(self, lower_steps: int, step: int) -> float:
        if self.schedule == "constant":
            return 1.0
        turn = step / self.steps if self.schedule == "cosine" else ((lower_steps + step) % self.period) / self.period
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * turn))

    def _for_group(self, group: Group, values: list[float]) -> float | Tensor:
        """One number where all members agree (the usual case, and the faster one), else a tensor with one per member."""
        mine = values[group.part] if isinstance(group.part, slice) else [values[group.part]]
        if all(value == mine[0] for value in mine):
            return mine[0]
        leaf = next(iter(group.x.values()))
        return torch.tensor(mine, dtype=leaf.dtype).to(leaf.device, non_blocking=True)
