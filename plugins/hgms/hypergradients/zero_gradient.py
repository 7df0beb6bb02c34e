"""A hypergradient of zero: θ does not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field

from hgms_core import Candidates, Cost, Estimate, Key, Problem, Selection, State, Tree, component
from hgms_core.validators import optional_positive


@final
@component
class Fixed:
    """h = 0: the lower level is trained at the given θ, and f is only reported.

    The lower baseline of every comparison (``uniform`` weights) and, with a reference θ, its upper
    baseline (``oracle-clean``).

    Notes
    -----
    Cost: 1 upper value.

    Source: the trivial estimator; registered so that fixed weights run under the same budget,
    records and stopping as the other methods.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: (2 * x["x"]).sum(),
    ... )
    >>> from hgms_core import Branch
    >>> branch = Branch(x=problem.x0)
    >>> Fixed().estimate(problem, problem.theta0, *branch.as_candidates(), Key(0), {})[0].value["t"]
    tensor([0.])
    """

    name: ClassVar[str] = "fixed"
    testing_failures: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "closed-form-bowl",
            "closed-form-ridge",
            "closed-form-sphere",
            "closed-form-sources",
            "central-difference",
        ),
        "h = 0 is its definition",
    )
    upper_batch_size: int | None = field(default=None, validator=optional_positive)

    def init(self, problem: Problem) -> State:
        return {}

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        branch = candidates.branch(selection.index)
        batch, rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        with torch.no_grad():
            loss = problem.f(theta, branch.x, batch)
        value = {name: torch.zeros_like(leaf) for name, leaf in theta.items()}
        return Estimate(value=value, upper_loss=loss, cost=Cost(upper_values=1, rows=rows)), state
