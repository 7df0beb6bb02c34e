"""Losses that say their outputs, and products with their generalised Gauss–Newton matrix: a library."""

from __future__ import annotations

from hgms_gauss_newton.criterion import Composite as Composite
from hgms_gauss_newton.criterion import composite as composite
from hgms_gauss_newton.criterion import says_outputs as says_outputs
from hgms_gauss_newton.differenced import by_difference as by_difference
from hgms_gauss_newton.product import Product as Product
from hgms_gauss_newton.product import gauss_newton as gauss_newton
