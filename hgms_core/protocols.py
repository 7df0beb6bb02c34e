"""The nouns: what a plugin can be. Start here.

A component is a frozen attrs class (:func:`hgms_core.component`) with a kebab-case ``name`` and
the methods below. Its fields
are its hyper-parameters and nothing else; data and state go through its methods, and state is a
value: nested dictionaries of tensors, numbers and strings, so that every run can be written to disk
and resumed. Nothing has to inherit from these protocols.

Any component may have ``lighter() -> list[str]``: what of its settings would take less memory, for
the message of a run that does not fit (:func:`hgms.config.lowering` writes it).

One outer step, in the order of the calls (:class:`hgms_core.Pipeline` makes them; the page of the
hooks has all of them)::

    candidates = generator.propose(problem, theta, start, key)      N lower states, stacked
    selection  = selector.select(problem, theta, candidates, key)   one of them
    estimate   = hypergradient.estimate(problem, theta, branch, …)  h ≈ ∇F(θ), by a LinearSolver
    theta      = outer.step(theta, h, …)                            then problem.project
    start      = generator.carry(start, candidates, selection)      what the next step starts from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from hgms_core.problem import Problem
from hgms_core.records import Branch, Candidates, Estimate, Record, Selection, Solution
from hgms_core.seeding import Key
from hgms_core.trees import Tree

State = dict[str, Any]
"""Nested dictionaries of tensors, numbers, strings and None: all that a component may remember."""

MatVec = Callable[[Tensor], Tensor]
"""A symmetric operator as its product with a vector: ``[d]`` to ``[d]``, or ``[N, d]`` to ``[N,
d]``, row by row.
"""


@runtime_checkable
class CandidateGenerator(Protocol):
    """Proposes N lower states. Every number it draws comes from ``key``, so a branch can be run
    again.

    What leads back through a candidate it puts on its :class:`Candidates`: the functions
    ``replay``, ``last_step`` and ``next_step``, which a hypergradient may call in the same outer
    step. None (the default) says that there is no such way.

    Called: ``init`` once in a run; ``propose`` first in every outer step; ``carry`` last.

    It may also have:

    - the entry ``progress`` in its state: the share of the budget spent stands there, in [0, 1],
      for schedules.
    - ``can_learn_start = True``: it starts from ``problem.start(theta)`` where the problem has one.
    - ``count`` and ``propose_some(problem, theta, start, key, members)``: these rows of what
      ``propose`` gives, for ranks.

    Two points beside the one it came from:

    >>> from hgms_core import component
    >>> from hgms_core import repeat
    >>> @component
    ... class Beside:
    ...     name = "beside"
    ...
    ...     def init(self, problem, key):
    ...         return {"x": problem.x0}
    ...
    ...     def propose(self, problem, theta, start, key):
    ...         x, draw = repeat(start["x"], 2), key.generator()
    ...         return Candidates(
    ...             x={
    ...                 name: leaf + torch.randn(leaf.shape, generator=draw)
    ...                 for name, leaf in x.items()
    ...             }
    ...         )
    ...
    ...     def carry(self, start, candidates, index, key, problem):
    ...         return {"x": candidates.at(index)}
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(3)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> Beside().propose(problem, {}, Beside().init(problem, Key(0)), Key(0)).x["x"].shape
    torch.Size([2, 3])
    """

    name: ClassVar[str]

    def init(self, problem: Problem, key: Key) -> State:
        """What the first call of ``propose`` starts from."""
        ...

    def propose(self, problem: Problem, theta: Tree, start: State, key: Key) -> Candidates:
        """N candidates as one stacked, detached tree. ``start`` is not changed."""
        ...

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        """What the next outer step starts from, given the selected ``index``."""
        ...


@runtime_checkable
class Selector(Protocol):
    """Picks one of N candidates, by their upper value on one shared batch or otherwise.

    It may also have ``draws = True`` where its choice is drawn by its key (softmax, Thompson):
    among equal candidates it is then not always the first, and the conformance kit looks at how
    often it takes which.

    Called: ``select`` in every outer step, after ``propose``. The candidate of least norm:

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
        """The choice, the scores and the gap. A candidate with a non-finite score is never
        chosen.
        """
        ...


@runtime_checkable
class LinearSolver(Protocol):
    """Solves (H + ridge·I) v = b from products with H.

    ``b`` is ``[d]``, or ``[N, d]`` for N systems with N different operators at once (``matvec``
    maps rows to rows). A solver never raises for non-convergence and never returns NaN: how it
    ended is in ``Solution.codes``.

    It may also have ``with_key(key) -> LinearSolver``, the same solver whose random numbers come
    from ``key``: an estimator then solves with that, by another key in every outer step. Without a
    key they come from a field of its own, ``seed``.

    Called: by hypergradient estimators that need one, once in an outer step; by a person's own code
    through ``hypergradient``. For an H that is 2·I (:class:`LinearSystem` and
    :class:`CallableSolver` do the rest):

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
    """Estimates ∇F(θ) at the selected candidate. It may also have ``estimate_all(problem, theta,
    candidates, selection, key, state)``, which is then called in the place of ``estimate``: for
    estimates that several candidates enter.

    Called: ``init`` once in a run; ``estimate`` in every outer step, after ``select``. The direct
    part alone, ∂_θ f, which is right where the lower solution does not depend on θ:

    >>> from hgms_core import component
    >>> @component
    ... class Direct:
    ...     name = "direct"
    ...
    ...     def init(self, problem):
    ...         return {}
    ...
    ...     def estimate(self, problem, theta, branch, key, state):
    ...         from hgms_core import Cost, upper_gradients
    ...
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
    >>> Direct().estimate(problem, problem.theta0, Branch(x=problem.x0), Key(0), {})[0].value["a"]
    tensor([2., 2.])
    """

    name: ClassVar[str]

    def init(self, problem: Problem) -> State:
        """What is remembered between outer steps (for example the last linear solution); ``{}``
        for nothing.
        """
        ...

    def estimate(
        self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
    ) -> tuple[Estimate, State]: ...


@runtime_checkable
class OuterOptimizer(Protocol):
    """Turns a hypergradient into the next θ. ``progress`` in [0, 1] is the share of the budget
    spent, for schedules.

    Called: ``init`` once in a run; ``step`` in every outer step, after ``estimate``. The problem's
        projection comes after it.

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

    ``version`` changes whenever results are no longer comparable with earlier ones; ``metrics``
    names what ``evaluate`` returns, with ``True`` where higher is better. It may also have
    ``metric_rows``, the rows of a metric by its name: "train" or "validation" if methods train x,
    select, or learn θ on them, so that comparisons rank no method by it (default: other rows, or
    none); ``traits``, a frozenset of what its problems have (``hgms compat`` compares them with
    what methods need), so that methods that need something else are refused before they run;
    ``made_of() -> dict``, JSON that changes with the files that ``problem`` reads
    (``data_fingerprint`` of ``hgms.config``): a run on other files is another run, and resuming it
    is rejected; and ``sharded``, true where each rank of a run (``run.ranks``) holds a part of its
    model alone: the ranks then build the problem together, and call each of its losses equally
    often, between steps too.

    Called: ``problem`` once in a run; ``made_of`` whenever a run's folder is asked for, so it has
        to be quick the second time.

    Where should a point lie so that the least of a bowl around it is at 1?

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
    """What can be compared: anything with a state that advances by outer steps.

    It may also have:

    - ``finished(state) -> bool``: it is done before its budget is; the run is evaluated and ends
      there.
    - ``ranking(problem, state) -> Tensor``, ``[n]``: a score for each row of
      ``problem.lower_data``, the higher the better, NaN for a row that must not be taken: for
      whoever chooses rows by the result, instead of drawing them by the mixture.
    - ``untrained``, a property: why the x of ``result`` is not one that was trained on the mixture
      to the end, empty where it is. Tables then give no verdict on its losses, which say nothing of
      the mixture.
    - ``role``, a class variable: "floor" of a trivial reference, "ceiling" of one that knows the
      truth. Tables set them apart.
    - ``needs``, a class variable: a frozenset of the traits that a task must have (`hgms describe`
      shows it).

    On a problem with named data sources (:attr:`Problem.sources`) θ says their weights: the runner
    records ``weight.<source>`` from ``result`` before the first step and after each.

    Called: ``init`` once in a run; ``step`` until the budget is spent; ``result`` after each step
    and at the end. A Pipeline is one; so is whatever is not made of its parts:

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
        """The state before the first step."""
        ...

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        """One outer step. ``state`` is not changed. The record is a flat row of tensors, numbers
        and strings; ``oracle_calls`` in it are those of all steps so far, and a budget in calls
        needs them.
        """
        ...

    def result(self, state: State) -> tuple[Tree, Tree]:
        """(θ, x) to evaluate and report."""
        ...
