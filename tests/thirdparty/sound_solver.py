"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: a linear solver."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from hgms_core import LinearSystem, MatVec, Outcome, Solution, hookimpl


@attrs.frozen(kw_only=True)
class Mine:
    """Steepest descent with exact steps.

    >>> Mine().solve(lambda v: 2 * v, torch.ones(3)).outcome.label
    'converged'

    Source: Cauchy (1847).
    """

    name: ClassVar[str] = "mine"
    ridge: float = 1e-2
    rtol: float = 1e-3
    max_steps: int = 50

    def solve(self, matvec: MatVec, b: torch.Tensor, x0: torch.Tensor | None = None) -> Solution:
        system = LinearSystem.of(matvec, b, ridge=self.ridge, rtol=self.rtol)
        x, r = system.start(x0)
        steps = 0
        length = system.size
        while steps < self.max_steps and (system.norm(r) > system.target).any():
            product = system.apply(r)
            length = system.dot(r, r) / system.dot(r, product).clamp_min(torch.finfo(b.dtype).tiny)
            x = x + system.rows(length) * r
            r = r - system.rows(length) * product
            steps = steps + 1
        done = system.norm(r) <= system.target
        codes = torch.where(
            done, system.codes(Outcome.CONVERGED), system.codes(Outcome.ITERATION_LIMIT)
        )
        return system.solution(
            x,
            system.norm(r),
            codes,
            torch.full_like(codes, steps),
            torch.full_like(length, torch.inf),
        )


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [Mine]
