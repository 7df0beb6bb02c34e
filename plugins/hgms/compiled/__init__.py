"""Faster steps: compiled functions, and the route of float32 matrix products."""

from __future__ import annotations

from hgms.compiled.forms import Numbers, form, launch
from hgms.compiled.levels import CompiledProduct, Levels, linearized
from hgms.compiled.loops import is_traced, repeat
from hgms.compiled.matmul import Product, RouteChoice, calibrated, choose
from hgms.compiled.programs import COMPILERS, Programs
from hgms.compiled.route import matrix_route

__all__ = [
    "COMPILERS",
    "CompiledProduct",
    "Levels",
    "Numbers",
    "Product",
    "Programs",
    "RouteChoice",
    "calibrated",
    "choose",
    "form",
    "is_traced",
    "launch",
    "linearized",
    "matrix_route",
    "repeat",
]
