"""A plugin file that is right in every way, for tests to spoil: a linear solver."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from hgms.solvers import CG
from hgms_core import MatVec, Solution, hookimpl


@attrs.frozen(kw_only=True)
class Mine:
    """Conjugate gradients under another name.

    >>> Mine().solve(lambda v: 2 * v, torch.ones(3)).outcome.label
    'converged'

    Source: Hestenes and Stiefel (1952).
    """

    name: ClassVar[str] = "mine"
    ridge: float = 1e-2
    rtol: float = 1e-3

    def solve(self, matvec: MatVec, b: torch.Tensor, x0: torch.Tensor | None = None) -> Solution:
        return CG(ridge=self.ridge, rtol=self.rtol).solve(matvec, b, x0)


@hookimpl
def hgms_register_linear_solvers() -> list[type]:
    return [Mine]
