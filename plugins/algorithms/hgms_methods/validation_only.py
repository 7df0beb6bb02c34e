"""The reference that trains on the validation rows alone: what a comparison is worth is read beside it."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import evolve
from torch import Tensor

from hgms_core import Batch, Data, Method, Problem, Record, State, Tree
from hgms_fields import frozen


@final
@frozen(kw_only=True)
class ValidationOnly:
    """Runs ``method`` on the problem whose lower loss is the upper one, on the validation rows that a method may train on::

        min_x f(θ, x)      on the rows of the roles ``differentiate`` and ``select``; the lower rows and g are not used

    With a method that leaves θ where it is (``uniform``) x learns from the validation rows and nothing else: the limit of the
    tilted lower level g + εf as ε → ∞. The rows of the role ``stop`` stay apart, for ``keep = "best"``.

    Use beside every method whose lower level sees validation rows (a tilt, a penalty on the value function): what it does not
    gain over this reference it did not learn from the training rows. Where f has no minimum in x without g (``sphere``, the two
    circles) it is refused. Avoid where the validation set is as large as the
    training set.

    Arguments:
        method: what trains; its settings are reached as ``method.method.…`` (``--set method.method.generator.steps=20``).

    Errors: those of the method. Cost: its own; a lower gradient of the records is a gradient of f.

    >>> from hgms_core import Key
    >>> problem = Problem(theta0={}, x0={"x": torch.zeros(1)}, g=lambda t, x, b: x["x"].sum(),
    ...                   f=lambda t, x, b: ((x["x"] - b["a"]) ** 2).mean(), lower_data=Data.of({"a": torch.zeros(9)}),
    ...                   upper_data={"differentiate": Data.of({"a": torch.ones(3)}), "select": Data.of({"a": torch.ones(2)})})
    >>> seen = on_validation(problem)
    >>> seen.lower_data.size, float(seen.g({}, {"x": torch.zeros(1)}, seen.lower_data.batch(None)))
    (5, 1.0)

    Source: this project; the comparison is the usual one of learning from a small clean set alone.
    """

    name: ClassVar[str] = "validation-only"

    method: Method

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"validation-rows"}) | frozenset(getattr(self.method, "needs", ()))

    def init(self, problem: Problem, seed: int) -> State:
        return self.method.init(on_validation(problem), seed)

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, Record]:
        return self.method.step(on_validation(problem), state, progress)

    def result(self, state: State) -> tuple[Tree, Tree]:
        return self.method.result(state)


def on_validation(problem: Problem) -> Problem:
    """The same problem with g = f, on the rows of the roles ``differentiate`` and ``select``."""
    first, second = problem.upper_data["differentiate"], problem.upper_data["select"]
    return evolve(problem, g=problem.f, lower_data=first if first is second else joined(first, second), rows=None)


def joined(first: Data, second: Data) -> Data:
    """The rows of two data sets with the same columns, as one."""
    if not first.size or not second.size:
        return first if first.size else second

    def rows(index: Tensor) -> Batch:
        above, below = first.rows(index.clamp(max=first.size - 1)), second.rows((index - first.size).clamp(min=0))
        return {name: _chosen(index < first.size, leaf, below[name]) for name, leaf in above.items()}

    return Data(first.size + second.size, {}, rows, first.device)


def _chosen(own: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Where ``own`` rows of ``above``, elsewhere of ``below``; texts of two lengths are filled up with zeros at their ends."""
    sizes = [max(pair) for pair in zip(above.shape, below.shape, strict=True)]
    above, below = (_padded(leaf, sizes) for leaf in (above, below))
    return torch.where(own.reshape(own.shape + (1,) * (above.ndim - own.ndim)).to(above.device), above, below)


def _padded(leaf: Tensor, sizes: list[int]) -> Tensor:
    missing = [size - own for own, size in zip(leaf.shape, sizes, strict=True)]
    return torch.nn.functional.pad(leaf, [n for more in reversed(missing) for n in (0, more)]) if any(missing) else leaf
