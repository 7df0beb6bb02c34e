"""HG-MS and what it is compared with, as compositions of parts by name; and the wrappers around a
pipeline.

A composition is the default configuration of a :class:`hgms_core.Pipeline`, or of a wrapper around
one. Any part or number can be changed where the method is used, e.g. ``--set
method.generator.count=8``; a wrapper's own fields stand among those of the pipeline inside, so
``--set method.tilt=1.0`` tilts any of them.
"""

from __future__ import annotations

from hgms.methods import hg_ms, published, references
from hgms.methods.learned_start import LearnedStart as LearnedStart
from hgms.methods.random_theta import RandomTheta as RandomTheta
from hgms.methods.starting_at import StartingAt as StartingAt
from hgms.methods.tilted import Tilted as Tilted
from hgms.methods.validation_only import ValidationOnly as ValidationOnly
from hgms_core import Composition, hookimpl


@hookimpl
def hgms_register_methods() -> list[type | Composition]:
    return [
        *hg_ms.METHODS,
        *published.METHODS,
        *references.METHODS,
        StartingAt,
        LearnedStart,
        Tilted,
    ]
