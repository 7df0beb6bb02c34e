"""Tasks: problems with known answers, cleaning, imbalance, regression."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.tasks.circle": "CircleDegenerate CircleKink",
    "hgms.tasks.cleaning": "HyperCleaning",
    "hgms.tasks.imbalanced": "ImbalancedLoss",
    "hgms.tasks.minima": "ManyMinima",
    "hgms.tasks.quadratic": "Quadratic",
    "hgms.tasks.regression": "LogisticCv RidgeCv",
    "hgms.tasks.sphere": "Sphere",
    "hgms.tasks.toy": "ToyPenalty",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
