"""Shared functions for rows: weights of lower rows, validation rows as one table, the best state by
the rows in the role ``stop``, and gradients in θ from sources.

The gradient in θ is computed from one number per source.
"""

from __future__ import annotations

from hgms.rows.alignment import mixture_slope
from hgms.rows.best_state import better_state, check_stop_rows, require_stop_rows
from hgms.rows.tables import join_rows, trained_on, weighted_rows

__all__ = [
    "better_state",
    "check_stop_rows",
    "join_rows",
    "mixture_slope",
    "require_stop_rows",
    "trained_on",
    "weighted_rows",
]
