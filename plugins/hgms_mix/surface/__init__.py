"""`hgms mix surface`: runs of many mixtures, a response surface over the simplex, a mixture with
its interval.
"""

from __future__ import annotations

from hgms_mix.surface.design import Point, design
from hgms_mix.surface.learn import Findings, learn
from hgms_mix.surface.process import Surface, fit
from hgms_mix.surface.settings import SurfaceSettings
from hgms_mix.surface.tables import Runs, read_runs, write_runs

__all__ = [
    "Findings",
    "Point",
    "Runs",
    "Surface",
    "SurfaceSettings",
    "design",
    "fit",
    "learn",
    "read_runs",
    "write_runs",
]
