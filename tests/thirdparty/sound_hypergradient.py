"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: a hypergradient
estimator.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch

from hgms_core import Branch, Estimate, Key, Problem, State, Tree, hookimpl, hypergradient


@attrs.frozen(kw_only=True)
class Mine:
    """∇F by the implicit function theorem, with the Hessian written out.

    >>> Mine().ridge
    0.0

    Source: the implicit function theorem.
    """

    name: ClassVar[str] = "mine"
    ridge: float = 0.0

    def init(self, problem: Problem) -> State:
        return {}

    def estimate(
        self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
    ) -> tuple[Estimate, State]:
        below = problem.lower_data.batch(None)
        above = problem.upper_data["differentiate"].batch(None)

        def dense(matvec: Any, b: torch.Tensor) -> torch.Tensor:
            eye = torch.eye(len(b), dtype=b.dtype)
            h = torch.stack([matvec(row) for row in eye], 1) + self.ridge * eye
            return torch.linalg.pinv(h, rtol=1e-6) @ b

        estimate = hypergradient(
            lambda t, x: problem.f(t, x, above),
            lambda t, x: problem.g(t, x, below),
            theta,
            branch.x,
            solver=dense,
        )
        return estimate, state


@hookimpl
def hgms_register_hypergradients() -> list[type]:
    return [Mine]
