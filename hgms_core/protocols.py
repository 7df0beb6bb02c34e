"""Protocols of all components that a plugin can provide. Start here.

A component is a frozen attrs class (:func:`hgms_core.component`) with a kebab-case ``name`` and
the methods below. Its fields contain only its hyper-parameters; its methods receive data and
state. State is a value: nested dictionaries of tensors, numbers, strings and None. Every run can
therefore be saved to disk and resumed. Components do not need to inherit from these protocols.

A component declares optional abilities by :mod:`hgms_core.capabilities`.

Any component may have ``memory_hints() -> list[str]``: changes of its settings that reduce memory.
If a run does not fit into memory, its error message lists them. :func:`hgms.config.lowering`
creates this method.

One outer step consists of these calls, in this order. :class:`hgms_core.Pipeline` makes the calls;
the page of the hooks lists all calls::

    candidates = generator.propose(problem, theta, start, key, progress)  N lower states, stacked
    selection  = selector.select(problem, theta, candidates, key)         the selected candidate
    estimate   = hypergradient.estimate(problem, theta, candidates, selection, …)  h ≈ ∇F(θ)
    theta      = outer.step(theta, h, …)                            then problem.project
    start      = generator.carry(start, candidates, selection.index, …)  for the next step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from hgms_core.problem import Problem
from hgms_core.records import Candidates, Estimate, Record, Selection, Solution
from hgms_core.seeding import Key
from hgms_core.trees import Tree

State = dict[str, Any]
"""The state of a component: nested dictionaries of tensors, numbers, strings and None."""

MatVec = Callable[[Tensor], Tensor]
"""A symmetric operator as a function that multiplies it by a vector: ``[d]`` to ``[d]``, or row by
row, ``[N, d]`` to ``[N, d]``.
"""


@runtime_checkable
class CandidateGenerator(Protocol):
    """Proposes N lower states. It draws all random numbers from ``key``, so a branch can be
    replayed.

    The generator stores functions for the backward pass through a candidate in its
    :class:`Candidates`: ``replay``, ``last_step`` and ``next_step``. A hypergradient may call them
    in the same outer step. None (the default) means that the generator does not provide a function.

    Called: ``init`` once per run; ``propose`` first in every outer step; ``carry`` last.

    Examples
    --------
    This generator starts at two random points near x and takes one gradient step from each:

    >>> from hgms_core import Cost, component, gradient, stack
    >>> @component
    ... class Nearby:
    ...     name = "nearby"
    ...
    ...     def init(self, problem, key):
    ...         return {"x": problem.x0}
    ...
    ...     def propose(self, problem, theta, start, key, progress):
    ...         draw = key.generator()
    ...         rows = problem.lower_data
    ...         ends = []
    ...         for _ in range(2):
    ...             x = {
    ...                 name: leaf + 0.1 * torch.randn(leaf.shape, generator=draw).to(leaf)
    ...                 for name, leaf in start["x"].items()
    ...             }
    ...             slopes, _ = gradient(problem.g, theta, x, rows.whole)
    ...             leaves = zip(x.items(), slopes, strict=True)
    ...             ends.append({name: leaf - 0.1 * slope for (name, leaf), slope in leaves})
    ...         cost = Cost(lower_gradients=2, rows=2 * rows.count(None))
    ...         return Candidates(x=stack(ends), cost=cost)
    ...
    ...     def carry(self, start, candidates, index, key, problem):
    ...         return {"x": candidates.at(index)}
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(3)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> start = Nearby().init(problem, Key(0))
    >>> Nearby().propose(problem, {}, start, Key(1), progress=0.0).x["x"].shape
    torch.Size([2, 3])
    """

    name: ClassVar[str]

    def init(self, problem: Problem, key: Key) -> State:
        """Return the start of the first call of ``propose``."""

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float
    ) -> Candidates:
        """Return N candidates as one stacked, detached tree. ``start`` is not changed.

        ``progress`` in [0, 1] is the share of the budget that is spent, for schedules.
        """

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        """Return the start of the next outer step, given the selected ``index``."""


@runtime_checkable
class Selector(Protocol):
    """Selects one of N candidates, by their upper value on one shared batch or by another score.

    Called: ``select`` in every outer step, after ``propose``. If it evaluates f, it declares that:
    ``Selection.of(scores, cost=Cost(upper_values=N, rows=N * rows))``.

    Examples
    --------
    This selector selects the candidate with the smallest norm:

    >>> from hgms_core import component
    >>> @component
    ... class Shortest:
    ...     name = "shortest"
    ...
    ...     def select(self, problem, theta, candidates, key):
    ...         scores = torch.stack(
    ...             [leaf.reshape(len(leaf), -1).norm(dim=1) for leaf in candidates.x.values()]
    ...         ).norm(dim=0)
    ...         return Selection.of(scores)
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> int(
    ...     Shortest()
    ...     .select(problem, {}, Candidates(x={"x": torch.tensor([[3.0], [-1.0]])}), Key(0))
    ...     .index
    ... )
    1
    """

    name: ClassVar[str]

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        """Return the choice, the scores and the gap.

        A candidate with a non-finite score is never selected.
        """


@runtime_checkable
class LinearSolver(Protocol):
    """Solves (H + ridge·I) v = b from products with H.

    ``b`` is ``[d]``, or ``[N, d]`` for N systems with N different operators at once (``matvec``
    maps rows to rows). A solver never raises an error for non-convergence and never returns NaN:
    ``Solution.codes`` contains the outcome.

    Called: by hypergradient estimators that require a solver, once per outer step; by user code
    through ``hypergradient``.

    Examples
    --------
    This solver is for H = 2·I (:class:`LinearSystem` and :class:`CallableSolver` do the rest):

    >>> from hgms_core import component
    >>> @component
    ... class Halves:
    ...     name = "halves"
    ...
    ...     def solve(self, matvec, b, x0=None):
    ...         from hgms_core import CallableSolver
    ...
    ...         return CallableSolver(lambda matvec, b: b / 2).solve(matvec, b)
    >>> Halves().solve(lambda v: 2 * v, torch.ones(2)).value
    tensor([0.5000, 0.5000])
    """

    name: ClassVar[str]

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution: ...


@runtime_checkable
class HyperGradient(Protocol):
    """Estimates ∇F(θ) at the selected candidate.

    Most estimators need only the selected candidate, ``candidates.branch(selection.index)``.

    Called: ``init`` once per run; ``estimate`` in every outer step, after ``select``.

    Examples
    --------
    This estimator returns only the direct part, ∂_θ f, which is correct if the lower solution does
    not depend on θ:

    >>> from hgms_core import Branch, component
    >>> @component
    ... class Direct:
    ...     name = "direct"
    ...
    ...     def init(self, problem):
    ...         return {}
    ...
    ...     def estimate(self, problem, theta, candidates, selection, key, state):
    ...         from hgms_core import Cost, upper_gradients
    ...
    ...         branch = candidates.branch(selection.index)
    ...         batch = problem.upper_data["differentiate"].batch(None)
    ...         loss, direct, _ = upper_gradients(
    ...             lambda theta, x: problem.f(theta, x, batch), theta, branch.x
    ...         )
    ...         return Estimate(value=direct, upper_loss=loss, cost=Cost(upper_gradients=1)), state
    >>> problem = Problem(
    ...     theta0={"a": torch.ones(2)},
    ...     x0={"x": torch.zeros(2)},
    ...     g=lambda theta, x, _: x["x"].square().sum(),
    ...     f=lambda theta, x, _: theta["a"].square().sum(),
    ... )
    >>> only = Branch(x=problem.x0).as_candidates()
    >>> Direct().estimate(problem, problem.theta0, *only, Key(0), {})[0].value["a"]
    tensor([2., 2.])
    """

    name: ClassVar[str]

    def init(self, problem: Problem) -> State:
        """Return the state that is kept between outer steps, such as the last linear solution.

        An estimator without state returns ``{}``.
        """

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]: ...


@runtime_checkable
class OuterOptimizer(Protocol):
    """Computes the next θ from a hypergradient. ``progress`` in [0, 1] is the share of the budget
    that is spent, for schedules.

    Called: ``init`` once per run; ``step`` in every outer step, after ``estimate``. The projection
        of the problem follows.

    Examples
    --------
    >>> from hgms_core import component
    >>> @component
    ... class Signs:
    ...     name = "signs"
    ...     lr: float = 0.1
    ...
    ...     def init(self, theta):
    ...         return {}
    ...
    ...     def step(self, theta, gradient, state, progress):
    ...         return {
    ...             name: leaf - self.lr * gradient[name].sign() for name, leaf in theta.items()
    ...         }, state
    >>> Signs().step({"a": torch.zeros(2)}, {"a": torch.tensor([3.0, -1.0])}, {}, 0.0)[0]["a"]
    tensor([-0.1000,  0.1000])
    """

    name: ClassVar[str]

    def init(self, theta: Tree) -> State: ...

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]: ...


@runtime_checkable
class Task(Protocol):
    """Builds a :class:`Problem` from its fields, a seed and a device. The same seed gives the same
    problem.

    ``version`` changes whenever results are no longer comparable with earlier results.
    ``metrics`` contains the names that ``evaluate`` returns, with ``True`` if higher is better.

    It may also have:

    - ``metric_rows``: the rows of a metric, by the name of the metric. They are "train" or
      "validation" if methods train x, select, or learn θ on these rows. Comparisons then do not
      rank methods by this metric. By default, a metric uses other rows, or no rows.
    - ``traits``: a frozenset of the features of its problems. HGMS compares them with
      the needs of the methods. A method that needs a missing trait is rejected before it
      runs.

    Called: ``problem`` once per run.

    Examples
    --------
    In this task, θ is the centre of a quadratic bowl. The aim is a bowl with its minimum at 1:

    >>> from hgms_core import component
    >>> @component
    ... class Point:
    ...     name, version, metrics = "point", "1", {"distance": False}
    ...
    ...     def problem(self, seed, device, dtype):
    ...         start = {"x": torch.zeros(2, device=device, dtype=dtype)}
    ...         return Problem(
    ...             theta0={"theta": start["x"]},
    ...             x0=start,
    ...             g=lambda theta, x, batch: 0.5 * (x["x"] - theta["theta"]).square().sum(),
    ...             f=lambda theta, x, batch: 0.5 * (x["x"] - 1).square().sum(),
    ...             evaluate=lambda theta, x: {"distance": float((theta["theta"] - 1).norm())},
    ...         )
    >>> problem = Point().problem(0, torch.device("cpu"), torch.float64)
    >>> round(problem.evaluate(problem.theta0, problem.x0)["distance"], 3)
    1.414
    """

    name: ClassVar[str]
    version: ClassVar[str]
    metrics: ClassVar[Mapping[str, bool]]

    def problem(self, seed: int, device: torch.device, dtype: torch.dtype) -> Problem: ...


@runtime_checkable
class Method(Protocol):
    """A method that comparisons can run: any object with a state that advances by outer steps.

    It may also have:

    - ``role``, a class variable: "floor" for a trivial reference, "ceiling" for a reference that
      knows the truth. Tables separate these references from other methods.
    - ``needs``, a class variable: a frozenset of the traits that a task must have (`hgms describe`
      shows it).

    On a problem with named data sources (:class:`Sources`), θ determines their weights. The
    runner records ``weight.<source>`` from ``result`` before the first step and after each step.

    Called: ``init`` once per run; ``step`` until the budget is spent; ``result`` after each step
    and at the end.

    Examples
    --------
    A Pipeline is a method. An object without the parts of a Pipeline can also be a method:

    >>> from hgms_core import component
    >>> @component
    ... class Guess:
    ...     name = "guess"
    ...
    ...     def init(self, problem, seed):
    ...         return {
    ...             "step": 0,
    ...             "seed": seed,
    ...             "theta": dict(problem.theta0),
    ...             "x": dict(problem.x0),
    ...         }
    ...
    ...     def step(self, problem, state, progress):
    ...         draw = Key(state["seed"]).fold("guess", state["step"]).generator()
    ...         theta = {
    ...             name: torch.randn(leaf.shape, generator=draw)
    ...             for name, leaf in state["theta"].items()
    ...         }
    ...         return {**state, "step": state["step"] + 1, "theta": theta}, {
    ...             "step": state["step"] + 1,
    ...             "oracle_calls": 0,
    ...         }
    ...
    ...     def result(self, state):
    ...         return state["theta"], state["x"]
    >>> problem = Problem(
    ...     theta0={"a": torch.zeros(1)},
    ...     x0={},
    ...     g=lambda t, x, _: t["a"].sum(),
    ...     f=lambda t, x, _: t["a"].sum(),
    ... )
    >>> state, record = Guess().step(problem, Guess().init(problem, 0), 0.0)
    >>> record["step"], Guess().result(state)[0]["a"].shape
    (1, torch.Size([1]))
    """

    name: ClassVar[str]

    def init(self, problem: Problem, seed: int) -> State:
        """Return the state before the first step."""

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        """Run one outer step; return the next state and the record. ``state`` is not changed.

        The record is a flat row of tensors, numbers and strings. Its ``oracle_calls`` is the total
        of all steps so far; a budget in oracle calls requires this entry.
        """

    def result(self, state: State) -> tuple[Tree, Tree]:
        """Return (θ, x) to evaluate and report."""
