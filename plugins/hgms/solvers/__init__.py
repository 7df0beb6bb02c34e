"""Linear solvers, one file each."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.solvers.cg": "CG",
    "hgms.solvers.fixed_point": "FixedPoint",
    "hgms.solvers.identity": "Identity",
    "hgms.solvers.minres": "MINRES",
    "hgms.solvers.neumann": "Neumann",
    "hgms.solvers.nystrom": "NystromCG",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
