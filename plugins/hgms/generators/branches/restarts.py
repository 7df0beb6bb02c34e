"""Restarts of any generator from a newly drawn lower state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, final

from attrs import evolve, field
from torch import Tensor

from hgms.facts import needs_of
from hgms.generators.branches.branches import Branches
from hgms_core import CandidateGenerator, Candidates, Key, Problem, State, Tree, component
from hgms_core.capabilities import (
    Capabilities,
    Fixed,
    JoinsStep,
    LearnsStart,
    ProposesSome,
    Restarting,
    capabilities_of,
)
from hgms_core.validators import positive


@final
@component
class Restarts:
    """Restart a generator from a new lower state after every ``restart_every`` outer steps.

    The new state is drawn as x0 is (``Problem.fresh``), and the generator starts from it as in the
    first outer step: moments and schedules restart. Use when the lower level memorises
    examples. In a configuration, set the key in the table of the generator: ``generator = { name =
    "branches", restart_every = 10 }``.

    Parameters
    ----------
    generator
        Any generator.
    restart_every
        Outer steps from one start to the next; 1 starts from a new lower state in every outer step.

    Notes
    -----
    Cost: the cost of the generator.

    Source: HG-MS paper, experiment appendix (restarts of the lower level in data hyper-cleaning).

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ...     fresh=lambda key: {"x": torch.full((1,), 5.0)},
    ... )
    >>> generator = Restarts(generator=Branches(count=1, steps=3), restart_every=2)
    >>> start = generator.init(problem, Key(0))
    >>> for _ in range(2):
    ...     candidates = generator.propose(problem, problem.theta0, start, Key(0), 0.0)
    ...     start = generator.carry(start, candidates, torch.tensor(0), Key(0), problem)
    >>> start["x"]["x"]
    tensor([[5.]])
    """

    name: ClassVar[str] = "restarts"

    generator: CandidateGenerator = field(factory=Branches, metadata={"flat": True})
    restart_every: int = field(default=10, validator=positive)

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.generator) & {ProposesSome, LearnsStart, JoinsStep}

    @property
    def needs(self) -> frozenset[str]:
        return needs_of(self.generator)

    @property
    def count(self) -> int:
        """Return the number of candidates of the generator."""
        return self._inner.count

    def init(self, problem: Problem, key: Key) -> State:
        return {**self.generator.init(problem, key), "outer_steps": 0}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        return self.generator.propose(problem, theta, start, key, progress)

    def propose_some(
        self,
        problem: Problem,
        theta: Tree,
        start: State,
        key: Key,
        progress: float,
        members: Sequence[int],
    ) -> Candidates:
        return self._inner.propose_some(problem, theta, start, key, progress, members)

    def operands(self, problem: Problem, start: State, key: Key, progress: float) -> Any:
        """Return the operands of the generator, and the restart if this step ends with one."""
        operands = self._inner.operands(problem, start, key, progress)
        value = operands.value if isinstance(operands, Fixed) else operands
        done = start["outer_steps"] + 1
        if value is None or done % self.restart_every:
            return value
        return Restarting(value, partial(self._restart, problem, done))

    def compute(self, problem: Problem, theta: Tree, start: State, operands: Any) -> Candidates:
        return self._inner.compute(problem, theta, start, operands)

    def carry(
        self, start: State, candidates: Candidates, index: Tensor, key: Key, problem: Problem
    ) -> State:
        done = start["outer_steps"] + 1
        # A compiled step, where the count is a tensor, contains no restart (see ``operands``).
        if not isinstance(done, Tensor) and done % self.restart_every == 0:
            return self._restart(problem, done, key)
        following = self.generator.carry(start, candidates, index, key, problem)
        return {**following, "outer_steps": done}

    def _restart(self, problem: Problem, done: int, key: Key) -> State:
        start = self.generator.init(evolve(problem, x0=problem.initial(key)), key)
        return {**start, "outer_steps": done}

    @property
    def _inner(self) -> Any:
        return self.generator
