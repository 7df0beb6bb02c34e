"""Every solver passes the kit's checks of numbers: ridges, starts, scales, rows, what is not
finite, and counts.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.conformance import faults

from hgms.contrib import LancBiO, RecycledCG, Roulette
from hgms.solvers import MINRES, FixedPoint, Identity, Neumann, NystromCG

SOLVERS = [
    MINRES(),
    NystromCG(),
    FixedPoint(lr=0.5),
    Neumann(lr=0.8, steps=60),
    Identity(),
    RecycledCG(),
    LancBiO(restart=20),
    Roulette(lr=0.8, steps=60),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda each: each.name)
def test_a_solver_passes_the_checks_of_the_kit(solver: Any) -> None:
    assert faults(solver) == {}
