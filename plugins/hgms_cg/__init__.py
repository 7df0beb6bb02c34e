"""Conjugate gradients, plain and Nyström-preconditioned."""

from __future__ import annotations

from hgms_cg.cg import CG as CG
from hgms_cg.nystrom import NystromCG as NystromCG
from hgms_core import LinearSolver, hookimpl


@hookimpl
def hgms_register_linear_solvers() -> list[type[LinearSolver]]:
    return [CG, NystromCG]
