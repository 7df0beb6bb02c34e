"""Linear solvers, one file each: our own, and those of SciPy and of linear_operator."""

from __future__ import annotations

from hgms_core import LinearSolver, hookimpl
from hgms_solvers.cg import CG as CG
from hgms_solvers.fixed_point import FixedPoint as FixedPoint
from hgms_solvers.gpytorch_solver import LinearOperatorSolver as LinearOperatorSolver
from hgms_solvers.identity import Identity as Identity
from hgms_solvers.kfac import KFAC as KFAC
from hgms_solvers.lancbio import LancBiO as LancBiO
from hgms_solvers.minres import MINRES as MINRES
from hgms_solvers.neumann import Neumann as Neumann
from hgms_solvers.nystrom import NystromCG as NystromCG
from hgms_solvers.recycled import RecycledCG as RecycledCG
from hgms_solvers.roulette import Roulette as Roulette
from hgms_solvers.scipy_solver import ScipySolver as ScipySolver


@hookimpl
def hgms_register_linear_solvers() -> list[type[LinearSolver]]:
    krylov = [CG, NystromCG, RecycledCG, LancBiO, MINRES, ScipySolver, LinearOperatorSolver]
    return [*krylov, KFAC, Identity, FixedPoint, Neumann, Roulette]
