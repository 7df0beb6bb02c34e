"""Candidate generators."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.generators.branches": "Branches Diversity Restarts Trajectory",
    "hgms.generators.penalty.dynamic_barrier": "DynamicBarrier",
    "hgms.generators.penalty.fully_first_order": "FullyFirstOrder",
    "hgms.generators.penalty.gradient_norm": "GradientNorm",
    "hgms.generators.penalty.minimax": "Minimax",
    "hgms.generators.penalty.moreau_envelope": "MoreauEnvelope",
    "hgms.generators.penalty.pair": "PairOptimizer Stages",
    "hgms.generators.penalty.ramp": "Ramp",
    "hgms.generators.penalty.value_free": "ValueFree",
    "hgms.generators.penalty.value_gap": "ValueGap",
    "hgms.generators.search": "Search",
    "hgms.generators.single_loop": "Soba",
    "hgms.generators.ula": "Ula",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
