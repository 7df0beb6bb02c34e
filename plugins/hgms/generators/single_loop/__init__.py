"""Single-loop methods: candidate generator `soba`, and the method of that name."""

from __future__ import annotations

from hgms.generators.single_loop.soba import Soba as Soba
from hgms_core import Composition, hookimpl

SOBA = Composition(
    name="soba",
    summary=(
        "SOBA: lower state, linear system and θ each move one step at once, from one pass "
        "over both losses."
    ),
    source="Dagréou, Ablin, Vaiter, Moreau, NeurIPS 2022 (arXiv 2201.13409).",
    parts={
        "generator": {
            "name": "soba",
            "lr": 0.1,
            "v_lr": 0.1,
            "batch_size": 256,
            "upper_batch_size": 256,
        },
        "selector": {"name": "first"},
        "hypergradient": {"name": "carried"},
        "outer": {"name": "sgd", "lr": 0.1},
        "max_curvature": 15.0,  # 1.5 / lr
    },
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Soba]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [SOBA]
