"""Faster steps by compiled functions."""

from __future__ import annotations

from hgms.compiled.forms import Numbers, form, launch
from hgms.compiled.levels import CompiledProduct, Levels, linearized
from hgms.compiled.loops import is_traced, repeat
from hgms.compiled.programs import COMPILERS, Programs

__all__ = [
    "COMPILERS",
    "CompiledProduct",
    "Levels",
    "Numbers",
    "Programs",
    "form",
    "is_traced",
    "launch",
    "linearized",
    "repeat",
]
