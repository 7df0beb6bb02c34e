"""The Neumann series and the fixed-point iteration behind it."""

from __future__ import annotations

from hgms_core import LinearSolver, hookimpl
from hgms_neumann.fixed_point import FixedPoint as FixedPoint
from hgms_neumann.neumann import Neumann as Neumann


@hookimpl
def hgms_register_linear_solvers() -> list[type[LinearSolver]]:
    return [FixedPoint, Neumann]
