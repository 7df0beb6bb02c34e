"""Optional abilities of components, each a small protocol that a component declares.

A component lists its abilities in ``capabilities``, and a caller uses :func:`find`. A method with
the same name that is not declared is never called. A wrapper computes ``capabilities`` as a
property, from the component inside. ``hgms describe`` prints the list, and the conformance kit
reports a component that has all members of a capability but does not declare it.

Examples
--------
>>> import torch
>>> from hgms_core import component
>>> @component
... class Shift:
...     name = "shift"
...     capabilities = frozenset({Randomized})
...     seed: int = 0
...
...     def with_key(self, key):
...         return Shift(seed=key.derive())
...
...     def solve(self, matvec, b, x0=None): ...
>>> find(Shift(), Randomized) is not None, find(Shift(), UsesLoss) is None
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:  # the core itself uses capabilities of losses
    import torch

    from hgms_core.data import Batch
    from hgms_core.problem import Loss, Problem
    from hgms_core.protocols import LinearSolver, MatVec, State
    from hgms_core.records import Candidates, Solution
    from hgms_core.seeding import Key
    from hgms_core.trees import Tree

__all__ = [
    "Capabilities",
    "DrawsChoice",
    "Finishes",
    "Fixed",
    "GivesRepresentations",
    "HasClosedForm",
    "HasData",
    "HasOutputs",
    "HasPlaceholder",
    "HasTestingInstance",
    "JoinsStep",
    "LearnsStart",
    "NotStackable",
    "ProposesSome",
    "Randomized",
    "RanksRows",
    "Recycles",
    "Restarting",
    "Sharded",
    "SolvesInProgram",
    "StacksCandidates",
    "UsesLoss",
    "capabilities_of",
    "find",
]

C = TypeVar("C")

Capabilities = frozenset[type]
"""The type of ``capabilities``."""


def find(component: object, capability: type[C]) -> C | None:
    """Return the component, typed as the capability, if it declares it; else None.

    Examples
    --------
    >>> find(object(), Finishes) is None
    True
    """
    return cast(C, component) if capability in capabilities_of(component) else None


def capabilities_of(component: object) -> Capabilities:
    """Return ``capabilities`` of a component; empty for a class that computes it per instance."""
    known: Any = getattr(component, "capabilities", frozenset())
    return frozenset() if isinstance(known, property) else known


# --- candidate generators


class ProposesSome(Protocol):
    """Computes single candidates. Ranks use it to split the N candidates."""

    count: int

    def propose_some(
        self,
        problem: Problem,
        theta: Tree,
        start: State,
        key: Key,
        progress: float,
        members: Sequence[int],
    ) -> Candidates:
        """Return the rows ``members`` of the result of ``propose``."""


class LearnsStart(Protocol):
    """Starts from ``problem.start(theta)``, if the problem has it."""


# --- selectors


class DrawsChoice(Protocol):
    """Draws the choice from the key (softmax, Thompson).

    It does not always select the first of equal candidates. The conformance kit counts how often it
    selects each candidate.
    """


# --- linear solvers


class Randomized(Protocol):
    """Draws random numbers from a key. Without a key, they come from the field ``seed``."""

    def with_key(self, key: Key) -> LinearSolver:
        """Return the same solver with random numbers from ``key``."""


class UsesLoss(Protocol):
    """Reads the lower loss itself, not only its products (Kronecker factors)."""

    def for_loss(self, loss: Loss, theta: Tree, x: Tree, batch: Batch) -> LinearSolver:
        """Return a solver for the Hessian of ``loss`` in x at this point."""


class Recycles(Protocol):
    """Keeps a memory between solves, such as a subspace or a preconditioner."""

    def solve_from(
        self, matvec: MatVec, b: Tensor, x0: Tensor | None, memory: State
    ) -> tuple[Solution, State]:
        """Solve with the memory of the last solve (``{}`` at first); return the next memory."""


class SolvesInProgram(Protocol):
    """Solves as a function of tensors, which a compiled program can contain.

    ``solve`` does not read the value of a tensor. Its loops are :func:`hgms.compiled.repeat`.
    """


# --- losses


class StacksCandidates(Protocol):
    """Evaluates N candidates at once, in place of ``torch.func.vmap``."""

    def stacked_losses(self, theta: Tree, x: Tree, batch: Batch, own_batch: bool) -> Tensor:
        """Return the losses ``[N]``. With ``own_batch``, the batch has a leading axis N."""


class NotStackable(Protocol):
    """Cannot be evaluated by ``torch.func.vmap``, so candidates are evaluated one by one."""


class HasOutputs(Protocol):
    """Is a criterion of outputs, criterion(θ, x, outputs(x; batch), batch): for Gauss–Newton."""

    outputs: Callable[[Tree, Batch], Any]
    criterion: Callable[[Tree, Tree, Any, Batch], Tensor]


# --- methods


class Finishes(Protocol):
    """May end before its budget is spent. The run is then evaluated and ends."""

    def is_finished(self, state: State) -> bool:
        """Return whether the method ends at ``state``."""


class RanksRows(Protocol):
    """Scores rows, for users who select rows instead of drawing them from a mixture."""

    def ranking(self, problem: Problem, state: State) -> Tensor:
        """Return a score per row of ``problem.lower_data``, ``[n]``, the higher the better.

        NaN excludes a row.
        """


class HasPlaceholder(Protocol):
    """Returns an x that may not be trained on the mixture to the end.

    Tables then give no verdict on the losses of the method, because they do not measure the
    mixture.
    """

    @property
    def placeholder_reason(self) -> str:
        """The reason why x is a placeholder; empty if x was trained."""


# --- tasks


class HasData(Protocol):
    """Reads files. A run on other files is another run, and resuming it is rejected."""

    def data_fingerprint(self) -> dict[str, Any]:
        """Return JSON that changes with the files (``data_fingerprint`` of ``hgms.config``).

        It is called for each request of a run's folder, so repeated calls must be fast.
        """


class HasClosedForm(Protocol):
    """Knows exact solutions, which ``hgms check-gradient`` and the kit compare."""

    def closed_form(self, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Return an object with ``solution(theta)``, and ``hypergradient(theta)`` if known."""


class Sharded(Protocol):
    """Can store only a part of the model on each rank of a run (``run.ranks``).

    The ranks then build the problem together. They call each loss of the problem equally often,
    also between steps.
    """

    sharded: bool


# --- examples of data sources (``Sources.examples``)


class GivesRepresentations(Protocol):
    """Computes representations of rows by the model."""

    def representations(self, x: Tree, batch: Batch) -> Tensor:
        """Return one vector per row, ``[B, d]``."""


# --- any component


@frozen
class Fixed:
    """Operands of a :class:`JoinsStep` that are the same in all steps of a problem."""

    value: Any


@frozen
class Restarting:
    """Operands of a generator whose next state is ``restart(key)`` instead of the result of
    ``carry``, for the key of ``carry``.
    """

    value: Any
    restart: Callable[[Key], State]


class JoinsStep(Protocol):
    """Can be compiled into one program with the other parts of an outer step.

    Such a step has two parts. ``operands`` runs in Python before each step: it draws random
    numbers and computes schedules. ``compute`` is traced once per shape of its arguments: it is a
    function of tensors, without keys, and the result equals the result of the ordinary method.
    Numbers in a state are tensors there. ``carry`` of such a generator draws no random numbers.
    """

    def operands(self, problem: Problem, *context: Any) -> Any:
        """Return tensors, None, and tuples and dictionaries of these.

        The context is (start, key, progress) for a generator, (key,) for a selector, (key, state)
        for a hypergradient, and (state, progress) for an outer optimiser. Return None if the part
        cannot be joined with its settings. If the operands are the same in all steps, return them
        as :class:`Fixed`: the method is then called once. A generator that restarts after this step
        returns them as :class:`Restarting`.
        """

    def compute(self, *arguments: Any) -> Any:
        """Return the part of the step.

        - generator: ``compute(problem, theta, start, operands)`` returns :class:`Candidates`.
        - selector: ``compute(problem, theta, candidates, operands)`` returns a :class:`Selection`.
        - hypergradient: ``compute(problem, theta, candidates, selection, state, operands)`` returns
          an :class:`Estimate` and its state.
        - outer optimiser: ``compute(theta, gradient, state, operands)`` returns θ and its state.
        """


class HasTestingInstance(Protocol):
    """Has its own instance for the conformance kit, in place of the defaults."""

    @classmethod
    def testing_instance(cls) -> Self:
        """Return a small, fast instance."""
