"""The minimum-residual method for symmetric indefinite or singular systems."""

from __future__ import annotations

from hgms_core import LinearSolver, hookimpl
from hgms_minres.minres import MINRES as MINRES


@hookimpl
def hgms_register_linear_solvers() -> list[type[LinearSolver]]:
    return [MINRES]
