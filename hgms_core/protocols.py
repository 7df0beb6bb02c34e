"""The nouns: what a plugin can be. Start here.

A component is any frozen attrs class with a kebab-case ``name`` and the methods below. Its fields are its hyper-parameters and
nothing else; data and state go through its methods, and state is a value: nested dictionaries of tensors, numbers and
strings, so that every run can be written to disk and resumed. Nothing has to inherit from these protocols.

One outer step, in the order of the calls (:class:`hgms_core.Pipeline` makes them)::

    candidates = generator.propose(problem, theta, start, key)      N lower states, stacked
    selection  = selector.select(problem, theta, candidates, key)   one of them
    estimate   = hypergradient.estimate(problem, theta, branch, …)  h ≈ ∇F(θ)        (asks a LinearSolver where it needs one)
    theta      = outer.step(theta, h, …)                            then problem.project
    start      = generator.carry(start, candidates, selection)      what the next step starts from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from attrs import Factory, frozen
from torch import Tensor

from hgms_core.problem import Problem
from hgms_core.records import Candidates, Cost, Hypergradient, LastStep, Record, Selection, Solution
from hgms_core.seeding import Key
from hgms_core.trees import Tree

State = dict[str, Any]
"""Nested dictionaries of tensors, numbers, strings and None: all that a component may remember."""

MatVec = Callable[[Tensor], Tensor]


@frozen(kw_only=True)
class Branch:
    """The selected candidate, its baggage, and how to get it again.

    ``x`` is the selected lower state (detached), ``aux`` what its generator sent along with it (optimiser moments, ScaleBiO's
    u, an upper gradient that came out of the same pass). ``replay(theta, last)`` runs the branch once more under autograd and
    returns the same state as a function of θ, through its ``last`` steps (None: all of them), and what that costs together
    with the backward pass. ``last_step()`` tells the branch's last step, from generators whose last step is linear in ∇_x g
    and that have the method ``last_step(problem, theta, start, key, index)``; None from others.
    """

    x: Tree
    replay: Callable[[Tree, int | None], tuple[Tree, Cost]]
    aux: Tree = Factory(dict)
    last_step: Callable[[], LastStep] | None = None


@runtime_checkable
class CandidateGenerator(Protocol):
    """Proposes N lower states. Every number it draws comes from ``key``, so a branch can be replayed.

    It may also have:

    - ``last_step(problem, theta, start, key, index) -> LastStep``, of ``propose`` with the same arguments: the last step of
      candidate ``index``, where that step is linear in ∇_x g (ConfigError where the settings make it another). It is what a
      hypergradient through one step needs, and reaches it as ``Branch.last_step``.
    - ``can_learn_start = True``: it starts from the leaves ``start.<name>`` of θ where there are such.
    """

    name: ClassVar[str]

    def init(self, problem: Problem, key: Key) -> State:
        """What the first call of ``propose`` starts from."""
        ...

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        """N candidates as one stacked, detached tree. ``start`` is not changed."""
        ...

    def replay(
        self, problem: Problem, theta: Tree, start: State, key: Key, index: Tensor, last: int | None
    ) -> tuple[Tree, Cost]:
        """Candidate ``index`` of ``propose`` with the same arguments, as a differentiable function of ``theta`` through its
        ``last`` steps (all if None), and the cost of running it and of going back through it."""
        ...

    def carry(self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem) -> State:
        """What the next outer step starts from, given the selected ``index``."""
        ...


@runtime_checkable
class Selector(Protocol):
    """Picks one of N candidates, by their upper value on one shared batch or otherwise."""

    name: ClassVar[str]

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        """The choice, the scores and the gap. A candidate with a non-finite score is never chosen."""
        ...


@runtime_checkable
class LinearSolver(Protocol):
    """Solves (H + ridge·I) v = b from products with H.

    ``b`` is ``[d]``, or ``[N, d]`` for N systems with N different operators at once (``matvec`` maps rows to rows). A solver
    never raises for non-convergence and never returns NaN: how it ended is in ``Solution.codes``.
    """

    name: ClassVar[str]

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution: ...


@runtime_checkable
class HyperGradient(Protocol):
    """Estimates ∇F(θ) at the selected candidate."""

    name: ClassVar[str]

    def init(self, problem: Problem) -> State:
        """What is remembered between outer steps (for example the last linear solution); ``{}`` for nothing."""
        ...

    def estimate(
        self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
    ) -> tuple[Hypergradient, State]: ...


@runtime_checkable
class OuterOptimizer(Protocol):
    """Turns a hypergradient into the next θ. ``progress`` in [0, 1] is the share of the budget spent, for schedules."""

    name: ClassVar[str]

    def init(self, theta: Tree) -> State: ...

    def step(self, theta: Tree, gradient: Tree, state: State, progress: float) -> tuple[Tree, State]: ...


@runtime_checkable
class Task(Protocol):
    """Builds a :class:`Problem` from its fields, a seed and a device. The same seed gives the same problem.

    ``version`` changes whenever results are no longer comparable with earlier ones; ``metrics`` names what ``evaluate``
    returns, with ``True`` where higher is better.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    metrics: ClassVar[Mapping[str, bool]]

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem: ...


@runtime_checkable
class Method(Protocol):
    """What can be compared: anything with a state that advances by outer steps.

    It may also have:

    - ``finished(state) -> bool``: it is done before its budget is; the run is evaluated and ends there.
    - ``ranking(problem, state) -> Tensor``, ``[n]``: a score for each row of ``problem.lower_data``, the higher the better,
      NaN for a row that must not be taken. Where rows are chosen from the result (``hgms mix``), the best of these are, instead
      of draws by the mixture.

    On a problem with named data sources (:attr:`Problem.sources`) θ says their weights: the runner records ``weight.<source>``
    from ``result`` before the first step and after each.
    """

    name: ClassVar[str]

    def init(self, problem: Problem, seed: int) -> State:
        """The state before the first step."""
        ...

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        """One outer step. ``state`` is not changed. The record is a flat row of tensors, numbers and strings."""
        ...

    def result(self, state: State) -> tuple[Tree, Tree]:
        """(θ, x) to evaluate and report."""
        ...
