"""Shared parts of the methods with penalty generators: rates, batches, and the other components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms_core import Composition

# Batch sizes are this project's choice (the penalty methods' original code uses all rows in each
# step).
BATCHES = {"batch_size": 256, "upper_batch_size": 100}
# The papers' plain gradient steps on θ need a different rate for each problem: ∂g/∂θ_i is of order
# 1/n for weights of n rows, and of order 1 for a weight decay. The outer optimiser is therefore
# Adam: its steps do not depend on the length of h. A short gradient memory, and rates that fall
# to 0, prevent oscillation of θ around the solution while y lags.
OUTER: dict[str, Any] = {
    "name": "adam",
    "lr": 0.1,
    "betas": [0.5, 0.999],
    "schedule": {"kind": "cosine", "final": 0.0},
}


def single_loop(
    name: str, summary: str, source: str, generator: Mapping[str, Any], **more: Any
) -> Composition:
    """Return a composition with a generator that also moves θ in its pass."""
    moves = {"selector": {"name": "first"}, "hypergradient": {"name": "carried"}, "outer": OUTER}
    parts = {"generator": {**generator, **BATCHES}, **moves}
    return Composition(name=name, summary=summary, source=source, parts=parts, **more)


def best_of_n(base: Composition, count: int, noise: float) -> Composition:
    """Return the method with N runs of its lower variables per θ, of which the best moves θ.

    The best run is selected on validation rows.
    """
    generator = {
        **base.parts["generator"],
        "count": count,
        "noise": noise,
        "carry_rule": "per-branch",
    }
    return Composition(
        name=f"{base.name}-best-of-n",
        summary=(
            f"{base.name} with best-of-N selection on top: N lower runs a step, of which the "
            "best moves θ."
        ),
        source=f"{base.source.rstrip('.')}, with the selection of HG-MS.",
        parts={**base.parts, "generator": generator, "selector": {"name": "best-of-n"}},
        on=base.on,
        testing=base.testing,
    )
