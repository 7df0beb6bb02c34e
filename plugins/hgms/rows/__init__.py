"""What components share about rows: validation rows as one table, and a number for each source
as a slope in θ.
"""

from __future__ import annotations

from hgms.rows.alignment import mixture_slope
from hgms.rows.tables import joined, trained_on

__all__ = ["joined", "mixture_slope", "trained_on"]
