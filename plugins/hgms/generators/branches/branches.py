"""N runs of an ordinary optimiser from one start: the practical candidate generator of HG-MS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, final

import torch
from attrs import field
from torch import Tensor

from hgms.config import lowering
from hgms.generators.branches.diversity import Diversity
from hgms.generators.branches.path import Path
from hgms.generators.branches.plan import run_all
from hgms.generators.branches.steps import Plan, check_mixed, starts
from hgms.optim import SGD, LowerOptimizer
from hgms_core import (
    Candidates,
    Cost,
    Data,
    Key,
    LastStep,
    Mode,
    Problem,
    State,
    Tree,
    component,
    detach,
    repeat,
)
from hgms_core.capabilities import Capabilities, ProposesSome
from hgms_core.validators import optional_positive, positive


@final
@component
class Branches:
    """N runs of an optimiser on the lower loss, K steps each, from a common or a separate start.

    Branch i has separate batches B and a step size η_i. For SGD (AdamW has its usual form with
    decoupled decay)::

        y ← y_start + noise_i,    y ← y − η_i (∇_y g(θ, y; B) clipped + wd_i·y)      K times

    Branch 0 is always free of noise. The candidates differ by the order of their batches, noise at
    the start, and factors on learning rate and weight decay. Use when the lower level is a network
    that is trained by steps, not solved. Avoid when a temperature matters (``ula``).

    Arguments:
        count: N. ``steps``: K, lower updates of each branch in one outer step.
        optimizer: :class:`hgms.optim.SGD`, ``AdamW``, ``Torch``, or ``Clip`` of one of these, with
            the learning rate and its schedule. In a file the name, or a table such as
            ``{ name = "adamw", lr = 0.02 }``.
        batch_size: examples per step; None uses all.
        diversity: the differences between branches (:class:`Diversity`): batches, noise, factors on
            learning rate and weight decay.
        accumulate: number of sequential batches per step. If g is a mean over rows, the gradient
            equals the gradient on all examples up to rounding. Only one batch's activations are in
            memory at a time.
        carry_rule: start of the next outer step: the ``selected`` branch for all, the noise-free
            ``base`` (branch 0) for all, or each branch's end (``per-branch``). :class:`Restarts`
            adds restarts from a newly drawn lower state.
        mode, chunk: stacked or looped evaluation, and the number of branches stacked at a time.
            ``auto`` selects by size, and loops if torch.func.vmap cannot evaluate the loss.
        keep_graph: with one branch, build its graph while proposing, so that ``unrolled`` does not
            replay it: saves K lower gradients per outer step. With several branches, the selected
            branch is still replayed, so the memory is the memory of one branch.
        backward: backward pass of a replay: through the ``graph`` of all its steps, or ``mixed``.
            ``mixed`` goes step by step from the end, each step from the state before it, with
            reverse-over-forward products (MixFlow-MG). It gives the same derivative, with K states
            in memory instead of K graphs. It requires losses with forward-mode derivatives, and
            ``sgd`` or ``adamw``.

    Cost: N·K lower gradients; with ``accumulate``, that many times more gradients, each of a part;
        with LBFGS as many as it takes. Memory: 4N lower states with AdamW, 2N with SGD, activations
        of ``chunk`` branches, kept graphs.

    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.full((1,), 4.0)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> branches = Branches(count=3, steps=50, diversity=Diversity(noise=1.0))
    >>> candidates = branches.propose(
    ...     problem, problem.theta0, branches.init(problem, Key(0)), Key(0)
    ... )
    >>> candidates.x["x"].shape, bool((candidates.x["x"].abs() < 1e-3).all())
    (torch.Size([3, 1]), True)

    Source: HG-MS paper, section "HG-MS" (finite-budget branch generator) and the experiment
        appendix.
    """

    name: ClassVar[str] = "branches"
    capabilities: ClassVar[Capabilities] = frozenset({ProposesSome})
    count: int = field(default=4, validator=positive)
    steps: int = field(default=20, validator=positive)
    optimizer: LowerOptimizer = field(factory=SGD)
    batch_size: int | None = field(default=None, validator=optional_positive)
    accumulate: int = field(default=1, validator=positive)
    diversity: Diversity = field(factory=Diversity)
    carry_rule: Literal["selected", "base", "per-branch"] = "selected"
    mode: Mode = "auto"
    chunk: int | None = field(default=None, validator=optional_positive)
    keep_graph: bool = False
    backward: Literal["graph", "mixed"] = "graph"
    memory_hints = lowering(same=["chunk"], other=["accumulate", "batch_size", "count"])

    def __attrs_post_init__(self) -> None:
        check_mixed(self.backward, self.optimizer)

    def init(self, problem: Problem, key: Key) -> State:
        x = repeat(problem.x0, self.count if self.carry_rule == "per-branch" else 1)
        return {
            "x": x,
            "moments": self.optimizer.rule(problem).no_moments(x),
            "optimizer_steps": 0,
            "lower_steps": 0,
        }

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        members = range(self.count)
        return self.propose_some(problem, theta, start, key, progress, members)

    def propose_some(
        self,
        problem: Problem,
        theta: Tree,
        start: State,
        key: Key,
        progress: float,
        members: Sequence[int],
    ) -> Candidates:
        """Return the candidates with the numbers ``members``.

        They equal the same candidates in a full proposal, because keys are addresses. Replays use
        the numbers of the full proposal.
        """

        def path(index: int | Tensor) -> Path:
            # Keys are created on the CPU, so the branch number must be on the CPU too. Read it from
            # the device only if there are several branches: reading waits for the GPU.
            return self._path(problem, start, key, 0 if self.count == 1 else int(index))

        def run_again(index: Tensor, theta: Tree, last: int | None) -> tuple[Tree, Cost]:
            return path(index).replay(theta, last)

        def last_step(index: Tensor) -> LastStep:
            self.optimizer.rule(problem).check_linear()
            return path(index).last_step(theta)

        def next_step(index: Tensor, x: Tree, key: Key) -> LastStep:
            self.optimizer.rule(problem).check_linear()
            rate = self._rates(problem, start)[-1][
                0 if self.diversity.lr_spread is None else int(index)
            ]
            batch, rows = problem.lower_data.sample(key, self.batch_size)
            return LastStep(x=x, batch=batch, rows=rows, rate=rate)

        if self.keep_graph and self.count == 1:
            x, moments, losses, replay = path(0).with_graph(theta, run_again)
            calls = self.steps
        else:
            (x, moments, losses, calls), replay = (
                self._forward(problem, detach(theta), start, key, members),
                run_again,
            )
        rows = calls * problem.lower_data.count(self.batch_size)
        cost = Cost(lower_gradients=calls * self._parts(problem.lower_data), rows=rows)
        return Candidates(
            x=x,
            aux=moments,
            losses=losses,
            cost=cost,
            replay=replay,
            last_step=last_step,
            next_step=next_step,
        )

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        x = candidates.x
        moments = candidates.aux
        if self.carry_rule != "per-branch":
            row = (
                index.reshape(1)
                if self.carry_rule == "selected"
                else torch.zeros_like(index).reshape(1)
            )
            x, moments = (
                {name: leaf.index_select(0, row) for name, leaf in tree.items()}
                for tree in (x, moments)
            )
        fresh = self.optimizer.moments == "fresh"
        return {
            "x": x,
            "moments": self.optimizer.rule(problem).no_moments(x) if fresh else moments,
            "optimizer_steps": 0 if fresh else start["optimizer_steps"] + self.steps,
            "lower_steps": start["lower_steps"] + self.steps,
        }

    def _forward(
        self, problem: Problem, theta: Tree, start: State, key: Key, members: Sequence[int]
    ) -> tuple[Tree, Tree, Tensor, int]:
        """Run the branches ``members`` without a graph.

        Return (ends, moments, last losses, number of gradients).
        """
        x, moments, index = self._begin(problem, start, key, members)
        rule = self.optimizer.rule(problem, start["optimizer_steps"])
        rates = [[step[member] for member in members] for step in self._rates(problem, start)]
        decays = self.diversity.decays(self.count)
        plan = Plan(
            rule=rule,
            index=index,
            own=self.diversity.batches == "independent" and index is not None,
            rates=rates,
            decays=[self.optimizer.decay * decays[member] for member in members],
            rows=problem.lower_data.count(self.batch_size),
            accumulate=self._parts(problem.lower_data),
            mode=self.mode,
            chunk=self.chunk,
        )
        losses, moments, calls = run_all(
            plan, problem, theta, x, moments, self.name, remember=self.optimizer.moments == "carry"
        )
        return x, moments, losses, calls

    def _path(self, problem: Problem, start: State, key: Key, member: int) -> Path:
        x, moments, index = self._begin(problem, start, key, [member])
        own = self.diversity.batches == "independent"
        return Path(
            rule=self.optimizer.rule(problem, start["optimizer_steps"]),
            problem=problem,
            x={name: leaf[0] for name, leaf in x.items()},
            moments={name: leaf[0] for name, leaf in moments.items()},
            index=None if index is None else index[0] if own else index,
            rates=[step[member] for step in self._rates(problem, start)],
            decay=self.optimizer.decay * self.diversity.decays(self.count)[member],
            rows=problem.lower_data.count(self.batch_size),
            accumulate=self._parts(problem.lower_data),
            mixed=self.backward == "mixed",
        )

    def _begin(
        self, problem: Problem, start: State, key: Key, members: Sequence[int]
    ) -> tuple[Tree, Tree, Tensor | None]:
        """Return starts, moments and row numbers of the branches ``members``.

        The result depends only on the arguments, so a branch can be replayed.
        """
        data = problem.lower_data
        x, moments = starts(start, self.count, members)
        whole = self.batch_size is None or self.batch_size >= data.size
        self.diversity.add_noise_(x, members, key, whole, self.optimizer.decay)
        key = key.fold("batches")
        if self.diversity.batches == "shared":
            return x, moments, data.draw(key, self.batch_size, self.steps)
        drawn = [data.draw(key.fold(member), self.batch_size, self.steps) for member in members]
        return (
            x,
            moments,
            None
            if drawn[0] is None
            else torch.stack([numbers for numbers in drawn if numbers is not None]),
        )

    def _rates(self, problem: Problem, start: State) -> list[list[float]]:
        return self.optimizer.rates(problem, self.diversity.rates(self.count), self.steps, start)

    def _parts(self, data: Data) -> int:
        """Return the number of batches per step."""
        return min(self.accumulate, data.count(self.batch_size))
