"""What the methods made of penalty generators share: rates, batches, and the parts around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms_core import Composition

# Rates are for losses that are means over thousands of examples, as in hyper-cleaning: ∂g/∂θ_i is
# then of order 1/n, and plain SGD on θ needs a rate of order n. The batches are ours (the penalty
# methods' own code takes all rows at each step).
BATCHES = {"batch_size": 256, "upper_batch_size": 100}
SIZE_ONE = {"outer": {"lr": 0.1}}
"""A rate for the conformance kit's problems, whose losses are not means over thousands."""


def single_loop(
    name: str,
    summary: str,
    source: str,
    generator: Mapping[str, Any],
    lr: float,
    outer: str = "sgd",
    **more: Any,
) -> Composition:
    """The generator whose pass also moves θ."""
    moves = {
        "selector": {"name": "first"},
        "hypergradient": {"name": "carried"},
        "outer": {"name": outer, "lr": lr},
    }
    parts = {"generator": {**generator, **BATCHES}, **moves}
    return Composition(
        name=name, summary=summary, source=source, parts=parts, **{"testing": SIZE_ONE, **more}
    )


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
