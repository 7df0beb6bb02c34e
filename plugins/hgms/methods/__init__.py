"""HG-MS and the methods that it is compared with, as compositions of named parts; and the wrappers
around a pipeline.

A composition is the default configuration of a :class:`hgms_core.Pipeline`, or of a wrapper around
one. Users can change any part or number, e.g. ``--set method.generator.count=8``. A wrapper's own
fields are next to the fields of the pipeline inside, so ``--set method.tilt=1.0`` tilts any method.
"""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.methods.bounded_curvature": "BoundedCurvature",
    "hgms.methods.crossfit": "CrossFit FlatBranches SharpnessAware",
    "hgms.methods.keep_best": "KeepBest",
    "hgms.methods.learned_start": "LearnedStart",
    "hgms.methods.random_theta": "RandomTheta",
    "hgms.methods.reweighting": "Agreement LearningToReweight MwNet OutOfFoldFilter SmallLoss",
    "hgms.methods.initial_theta": "StartingAt",
    "hgms.methods.tilt": "Tilted",
    "hgms.methods.validation_only": "ValidationOnly",
    "hgms.tuning.auto": "Auto",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
