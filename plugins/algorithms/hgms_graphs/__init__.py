"""What makes steps faster: compiled programs, CUDA graphs, and the route of float32 matrix products."""

from __future__ import annotations

from hgms_graphs.forms import Numbers, form, launch
from hgms_graphs.graphs import RecordedProduct, Recording, recorded
from hgms_graphs.levels import CompiledProduct, linearized
from hgms_graphs.matmul import Product, RouteChoice, calibrated, choose
from hgms_graphs.programs import Programs, programs_of
from hgms_graphs.route import matrix_route

__all__ = [
    "CompiledProduct", "Numbers", "Product", "Programs", "RecordedProduct", "Recording", "RouteChoice", "calibrated", "choose",
    "form", "launch", "linearized", "matrix_route", "programs_of", "recorded",
]  # fmt: skip
