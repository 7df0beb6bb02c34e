"""What the methods made of penalty generators share: rates, batches, and the parts around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms_core import Composition

# The batches are ours (the penalty methods' own code takes all rows at each step).
BATCHES = {"batch_size": 256, "upper_batch_size": 100}
# The papers' plain gradient steps on θ need another rate for each problem: ∂g/∂θ_i is of order 1/n
# for weights of n rows, and of order 1 for a weight decay. So θ is stepped by Adam, whose steps do
# not depend on the length of h. A short memory of the gradient, and rates that fall to 0, keep θ
# from swinging around the solution while y lags behind.
OUTER: dict[str, Any] = {
    "name": "adam",
    "lr": 0.1,
    "betas": [0.5, 0.999],
    "schedule": {"kind": "cosine", "final": 0.0},
}


def single_loop(
    name: str, summary: str, source: str, generator: Mapping[str, Any], **more: Any
) -> Composition:
    """The generator whose pass also moves θ."""
    moves = {"selector": {"name": "first"}, "hypergradient": {"name": "carried"}, "outer": OUTER}
    parts = {"generator": {**generator, **BATCHES}, **moves}
    return Composition(name=name, summary=summary, source=source, parts=parts, **more)


def best_of_n(base: Composition, count: int, noise: float) -> Composition:
    """The method with N runs of its lower variables under one θ, which follows the run that is
    best on validation rows.
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
