"""A reference that trains only on the validation rows: a baseline for comparisons."""

from __future__ import annotations

from typing import ClassVar, final

from attrs import evolve

from hgms.facts import needs_of
from hgms.methods.inner_pipeline import Wrapper, another
from hgms.rows import trained_on
from hgms_core import Method, Problem, Rows, component


@final
@component
class ValidationOnly(Wrapper):
    """Run ``method`` with the upper loss as lower loss, on the validation rows that a method may
    train on::

        min_x f(θ, x)      on the rows of the roles ``differentiate`` and ``select``

    The lower rows and g are not used.

    With a method that keeps θ constant (``uniform``), x learns only from the validation rows. This
    is the limit of the tilted lower level g + εf as ε → ∞. The rows of the role ``stop`` are not
    used for training; they are reserved for ``keep = "best"``.

    Use as a baseline for every method whose lower level sees validation rows (a tilt, a penalty on
    the value function): only a gain over this reference comes from the training rows. If f has no
    minimum in x without g (``sphere``, the two circles), the task is rejected. Avoid if the
    validation set is as large as the training set.

    Parameters
    ----------
    method
        The method that trains; its settings have the prefix ``method.method.…``
        (``--set method.method.generator.steps=20``).

    Raises
    ------
    HgmsError
        The errors of the method.

    Notes
    -----
    Cost: the cost of the method; a lower gradient of the records is a gradient of f.

    Source: this project; the comparison is the usual baseline of learning only from a small clean
    set.

    Examples
    --------
    >>> import torch
    >>> from hgms_core import Data
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.zeros(1)},
    ...     g=lambda t, x, b: x["x"].sum(),
    ...     f=lambda t, x, b: ((x["x"] - b["a"]) ** 2).mean(),
    ...     lower_data=Data.of({"a": torch.zeros(9)}),
    ...     upper_data={
    ...         "differentiate": Data.of({"a": torch.ones(3)}),
    ...         "select": Data.of({"a": torch.ones(2)}),
    ...     },
    ... )
    >>> seen = on_validation(problem)
    >>> seen.lower_data.size, float(seen.g({}, {"x": torch.zeros(1)}, seen.lower_data.batch(None)))
    (5, 1.0)
    """

    name: ClassVar[str] = "validation-only"

    method: Method

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"validation-rows"}) | needs_of(self.method)

    def changed_problem(self, problem: Problem) -> Problem:
        return another(problem, "validation-only", lambda: on_validation(problem))


def on_validation(problem: Problem) -> Problem:
    """Return the same problem with g = f, on the rows of the roles ``differentiate`` and
    ``select``.
    """
    return evolve(problem.without(Rows), g=problem.f, lower_data=trained_on(problem))
