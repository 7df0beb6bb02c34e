"""Steps recorded once and replayed (CUDA graphs); the route of float32 matrix products."""

from __future__ import annotations

from hgms_graphs.graphs import RecordedProduct, Recording, recorded
from hgms_graphs.matmul import Product, RouteChoice, calibrated, choose, matrix_route

__all__ = [
    "Product", "RecordedProduct", "Recording", "RouteChoice", "calibrated", "choose", "matrix_route", "recorded",
]  # fmt: skip
