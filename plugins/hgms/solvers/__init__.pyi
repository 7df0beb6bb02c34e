from hgms.solvers.cg import CG as CG
from hgms.solvers.fixed_point import FixedPoint as FixedPoint
from hgms.solvers.identity import Identity as Identity
from hgms.solvers.minres import MINRES as MINRES
from hgms.solvers.neumann import Neumann as Neumann
from hgms.solvers.nystrom import NystromCG as NystromCG
