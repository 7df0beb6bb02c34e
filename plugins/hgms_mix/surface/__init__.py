"""`hgms mix surface`: run many mixtures, fit a response surface, recommend a mixture.

The surface is over the simplex; the recommended mixture has an interval.
"""

from __future__ import annotations

from hgms_mix.surface.design import Point, design
from hgms_mix.surface.learn import Findings, learn
from hgms_mix.surface.process import Surface, fit
from hgms_mix.surface.settings import SurfaceSettings
from hgms_mix.surface.tables import Runs, write_runs

__all__ = [
    "Findings",
    "Point",
    "Runs",
    "Surface",
    "SurfaceSettings",
    "design",
    "fit",
    "learn",
    "write_runs",
]
