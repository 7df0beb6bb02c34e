"""Losses that declare their outputs, and products with their generalised Gauss–Newton matrix.

This package is a library.
"""

from __future__ import annotations

from hgms.gauss_newton.criterion import Composite as Composite
from hgms.gauss_newton.criterion import composite as composite
from hgms.gauss_newton.finite_difference import by_difference as by_difference
from hgms.gauss_newton.product import Product as Product
from hgms.gauss_newton.product import gauss_newton as gauss_newton
