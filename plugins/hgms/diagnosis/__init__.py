"""Quality of the hypergradients of a run, measured every N outer steps.

The setting is ``run.diagnose = N``.
"""

from __future__ import annotations

from hgms.diagnosis.capture import pipeline_of
from hgms.diagnosis.float64 import in_double
from hgms.diagnosis.measure import Diagnosing
from hgms.diagnosis.spectrum import spectrum
from hgms.diagnosis.words import ALIKE, BIASED, SIGMAS, Diagnosis, number, power

__all__ = [
    "ALIKE",
    "BIASED",
    "SIGMAS",
    "Diagnosing",
    "Diagnosis",
    "in_double",
    "number",
    "pipeline_of",
    "power",
    "spectrum",
]
