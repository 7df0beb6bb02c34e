"""Uncertainty of a learned mixture: intervals, tests and sentences.

The tests cover seeds, rows, and the comparison with halves of one source.
"""

from __future__ import annotations

from hgms.uncertainty.alignment import Alignments, alignments, cost
from hgms.uncertainty.halves import HalvesTest, Parted, halves_test
from hgms.uncertainty.rows import over_rows
from hgms.uncertainty.seeds import over_seeds
from hgms.uncertainty.simplex import LEAST, centre, clr, with_pivot
from hgms.uncertainty.verdict import Effect, Uncertainty, holm, in_words, join_names

__all__ = [
    "LEAST",
    "Alignments",
    "Effect",
    "HalvesTest",
    "Parted",
    "Uncertainty",
    "alignments",
    "centre",
    "clr",
    "cost",
    "halves_test",
    "holm",
    "in_words",
    "join_names",
    "over_rows",
    "over_seeds",
    "with_pivot",
]
