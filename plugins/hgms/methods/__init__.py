"""HG-MS and what it is compared with, as compositions of parts by name; and the wrappers around a
pipeline.

A composition is the default configuration of a :class:`hgms_core.Pipeline`, or of a wrapper around
one. Any part or number can be changed where the method is used, e.g. ``--set
method.generator.count=8``; a wrapper's own fields stand among those of the pipeline inside, so
``--set method.tilt=1.0`` tilts any of them.
"""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.methods.crossfit": "CrossFit FlatBranches",
    "hgms.methods.learned_start": "LearnedStart",
    "hgms.methods.random_theta": "RandomTheta",
    "hgms.methods.reweighting": "Agreement LearningToReweight MwNet SmallLoss",
    "hgms.methods.starting_at": "StartingAt",
    "hgms.methods.tilted": "Tilted",
    "hgms.methods.validation_only": "ValidationOnly",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
