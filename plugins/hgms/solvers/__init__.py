"""Linear solvers, one file each: our own, and those of SciPy and of linear_operator."""

from __future__ import annotations

from hgms.solvers.cg import CG as CG
from hgms.solvers.fixed_point import FixedPoint as FixedPoint
from hgms.solvers.gpytorch_solver import LinearOperatorSolver as LinearOperatorSolver
from hgms.solvers.identity import Identity as Identity
from hgms.solvers.kfac import KFAC as KFAC
from hgms.solvers.lancbio import LancBiO as LancBiO
from hgms.solvers.minres import MINRES as MINRES
from hgms.solvers.neumann import Neumann as Neumann
from hgms.solvers.nystrom import NystromCG as NystromCG
from hgms.solvers.recycled import RecycledCG as RecycledCG
from hgms.solvers.roulette import Roulette as Roulette
from hgms.solvers.scipy_solver import ScipySolver as ScipySolver
from hgms_core import LinearSolver, hookimpl


@hookimpl
def hgms_register_linear_solvers() -> list[type[LinearSolver]]:
    krylov = [CG, NystromCG, RecycledCG, LancBiO, MINRES, ScipySolver, LinearOperatorSolver]
    return [*krylov, KFAC, Identity, FixedPoint, Neumann, Roulette]
