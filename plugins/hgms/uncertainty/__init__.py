"""Uncertainty of a learned mixture: intervals, tests and sentences.

The tests cover seeds and rows.
"""

from __future__ import annotations

from hgms.uncertainty.alignment import Alignments, alignments
from hgms.uncertainty.rows import over_rows
from hgms.uncertainty.seeds import over_seeds
from hgms.uncertainty.simplex import LEAST, centre, clr, with_pivot
from hgms.uncertainty.verdict import Effect, Uncertainty, holm, in_words, join_names

__all__ = [
    "LEAST",
    "Alignments",
    "Effect",
    "Uncertainty",
    "alignments",
    "centre",
    "clr",
    "holm",
    "in_words",
    "join_names",
    "over_rows",
    "over_seeds",
    "with_pivot",
]
