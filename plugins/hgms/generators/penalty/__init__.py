"""Penalty methods: generators whose pass also yields the upper gradient, and the methods made of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms.generators.penalty.dynamic_barrier import DynamicBarrier as DynamicBarrier
from hgms.generators.penalty.fully_first_order import FullyFirstOrder as FullyFirstOrder
from hgms.generators.penalty.gradient_norm import GradientNorm as GradientNorm
from hgms.generators.penalty.minimax import Minimax as Minimax
from hgms.generators.penalty.moreau_envelope import MoreauEnvelope as MoreauEnvelope
from hgms.generators.penalty.value_free import ValueFree as ValueFree
from hgms.generators.penalty.value_gap import ValueGap as ValueGap
from hgms_core import Composition, hookimpl

# Rates are for losses that are means over thousands of examples, as in hyper-cleaning: ∂g/∂θ_i is
# then of order 1/n, and plain SGD on θ needs a rate of order n. The batches are ours (the penalty
# methods' own code takes all rows at each step).
BATCHES = {"batch_size": 256, "upper_batch_size": 100}
SIZE_ONE = {"outer": {"lr": 0.1}}
"""A rate for the conformance kit's problems, whose losses are not means over thousands."""


def _single_loop(
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


V_PBGD = _single_loop(
    "v-pbgd",
    "Penalty on the value gap g(y) − g(ω): y, ω and θ move together, first order.",
    "Shen and Chen 2023, V-PBGD.",
    {
        "name": "value-gap",
        "steps": 1,
        "lr": 0.3,
        "inner_lr": 0.3,
        "gamma": 10.0,
        "gamma_steps": 1000,
    },
    lr=1e4,
)

G_PBGD = _single_loop(
    "g-pbgd",
    "Penalty on ‖∇_y g‖²: y and θ move together, one Hessian product a step.",
    "Shen and Chen 2023, G-PBGD.",
    {"name": "gradient-norm", "lr": 0.5, "gamma": 5.0, "gamma_steps": 1000},
    lr=1e3,
    testing={"generator": {"lr": 0.1}, **SIZE_ONE},
)

SCALEBIO = _single_loop(
    "scalebio",
    (
        "Minimax game of two lower models, min over (θ, w) and max over u of f(w) + α (g(w) − "
        "g(u)), "
        "first order."
    ),
    "Pan et al. 2025, ScaleBiO.",
    {"name": "minimax", "lr": 0.03, "alpha": 10.0},
    lr=1e3,
    # As its authors run it: AdamW for u, w and the logits, all rates falling to 0 as a cosine.
    # Theirs are 1e-5 and 1e-2 with whole models, where `blocks = 2` is their LISA; 1e-4 is for
    # adapters, with which they do not combine it.
    on={
        "sources": {
            "generator": {
                "optimizer": "adamw",
                "lr": 1e-4,
                "weight_decay": 5e-4,
                "schedule": "cosine",
                "batch_size": 16,
                "upper_batch_size": 16,
            },
            "outer": {
                "name": "adamw",
                "lr": 0.01,
                "weight_decay": 0.01,
                "schedule": {"kind": "cosine", "final": 0.0},
            },
        }
    },
)

BOME = _single_loop(
    "bome",
    (
        "θ and y move along ∇f, bent by a dynamic barrier so that the value gap keeps falling; "
        "first "
        "order."
    ),
    "Liu et al. 2022, BOME.",
    {"name": "dynamic-barrier", "steps": 10, "inner_lr": 0.3, "lr": 0.3, "eta": 0.5},
    lr=1e4,
)

F2SA = _single_loop(
    "f2sa",
    (
        "Value gap with a growing multiplier: y descends f + λg, z descends g, θ follows the new "
        "pair; first order."
    ),
    "Kwon, Kwon, Wright and Nowak 2023, F2SA.",
    {
        "name": "fully-first-order",
        "steps": 1,
        "lr": 0.3,
        "inner_lr": 0.3,
        "penalty": 1.0,
        "growth": 1 / 7,
    },
    lr=1e3,
)

MEHA = _single_loop(
    "meha",
    (
        "Penalty on g minus its Moreau envelope: y, the proximal point z and θ move together, "
        "first "
        "order."
    ),
    "Liu, Liu, Yao, Zeng and Zhang 2024, MEHA.",
    {
        "name": "moreau-envelope",
        "lr": 0.1,
        "inner_lr": 0.1,
        "gamma": 10.0,
        "penalty": 1.0,
        "growth": 0.49,
    },
    lr=0.1,
    outer="adam",  # h falls with 1/c_k, which Adam does not see
)

PBGD_FREE = _single_loop(
    "pbgd-free",
    "y descends f + γg and θ follows ∂f/∂θ alone, for an f that θ enters directly; first order.",
    "Jiang, Xiao, Chen and Chen 2025, PBGD-Free.",
    {"name": "value-free", "steps": 1, "lr": 0.3, "gamma": 10.0},
    lr=0.1,
    testing_failures={
        "optimum": "its θ stays where it is, as f does not depend on θ directly there"
    },
)


def _best_of_n(base: Composition, count: int, noise: float) -> Composition:
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


SCALEBIO_BEST_OF_N = _best_of_n(SCALEBIO, count=4, noise=0.01)
V_PBGD_BEST_OF_N = _best_of_n(V_PBGD, count=4, noise=0.01)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [
        ValueGap,
        GradientNorm,
        Minimax,
        DynamicBarrier,
        FullyFirstOrder,
        MoreauEnvelope,
        ValueFree,
    ]


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [
        V_PBGD,
        G_PBGD,
        SCALEBIO,
        BOME,
        F2SA,
        MEHA,
        PBGD_FREE,
        SCALEBIO_BEST_OF_N,
        V_PBGD_BEST_OF_N,
    ]
