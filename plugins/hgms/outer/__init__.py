"""Outer optimisers, one file per family."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.outer.additive": "Adam AdamW ProjectedGradient Sgd",
    "hgms.outer.averaging": "DualAveraging",
    "hgms.outer.exponentiated_gradient": "ExponentiatedGradient",
    "hgms.outer.shape": "Projection Schedule",
    "hgms.outer.split": "Split",
    "hgms.outer.torch_optimizer": "TorchOptimizer",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
