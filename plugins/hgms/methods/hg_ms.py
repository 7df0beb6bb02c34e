"""HG-MS in its analysed and practical forms, and its ablations."""

from __future__ import annotations

from typing import Any

from hgms.methods.keep_best import KeepBest
from hgms.methods.tilt import Tilted
from hgms_core import Composition, hookimpl

HG_MS_ULA = Composition(
    name="hg-ms-ula",
    summary=(
        "HG-MS as analysed: best of N Langevin chains at temperature λ, ridge CG with "
        "clipping, projected gradient."
    ),
    source="HG-MS paper, Algorithm 1 with Algorithm ULA.",
    parts={
        # Chains start from a Gaussian of deviation √(spread · temperature) = 0.3 around the last
        # selected state. From one point they would spread by √(2 · temperature · lr · steps) = 0.08
        # a step, too little to find another part of S(θ).
        "generator": {
            "name": "ula",
            "count": 8,
            "steps": 60,
            "lr": 5e-2,
            "temperature": 1e-3,
            "spread": 100.0,
            "carry_rule": "selected",
        },
        "selector": {"name": "best-of-n"},
        "hypergradient": {
            "name": "implicit",
            "solver": {"name": "cg", "ridge": 1e-2, "rtol": 1e-3, "max_steps": 30, "clip": 1e3},
        },
        "outer": {"name": "projected-gradient", "lr": 0.1},
        "max_curvature": 36.0,  # 1.8 / lr
    },
)

# For a language model with weighted data sources: one SGD step per branch, the exact derivative of
# one more step, Adam on the logits. The settings are the paper's for Llama-3-8B and Gemma-2-9B,
# except the batch sizes, which the paper does not state.
ONE_STEP: dict[str, Any] = {
    "generator": {
        "name": "branches",
        "count": 4,
        "steps": 1,
        "optimizer": {"name": "sgd", "lr": 1e-4},
        "diversity": {"noise": 1e-5},
        "batch_size": 16,
        "restart_every": None,
    },
    "hypergradient": {"name": "through-step", "upper_batch_size": 16},
    "selector": {"name": "best-of-n", "batch_size": 16},
    "outer": {"name": "adam", "lr": 0.05, "betas": [0.9, 0.999], "schedule": {"kind": "constant"}},
    "keep": "last",
}
ONE_BRANCH: dict[str, Any] = {
    **ONE_STEP,
    "generator": {**ONE_STEP["generator"], "count": 1, "diversity": {}, "keep_path": "none"},
    "selector": {"name": "first"},
}

# Weights of data sources: averaged alignment of each source's direction, with the task's own
# weights as a prior.
HG_MS_MIXTURE = Composition(
    name="hg-ms-mixture",
    summary=(
        "HG-MS for weights of data sources: AdamW branches, aligned hypergradients, dual "
        "averaging from a prior."
    ),
    source=(
        "HG-MS paper, section on language models; the cosines of LESS (Xia et al. 2024); Xiao 2010."
    ),
    parts={
        "generator": {
            "name": "branches",
            "count": 1,
            "steps": 4,
            "optimizer": {"name": "adamw", "lr": 2e-4},
            "batch_size": 16,
            "restart_every": None,
        },
        "selector": {"name": "best-of-n", "batch_size": 16},
        "hypergradient": {"name": "aligned", "batch_size": 16, "upper_batch_size": 16},
        "outer": {"name": "dual-averaging", "strength": 20.0, "prior_steps": 10.0},
        "keep": "last",
    },
    testing={"generator": {"optimizer": {"lr": 0.05}}},
)

HG_MS = Composition(
    name="hg-ms",
    summary=(
        "HG-MS as practised: best of N optimiser branches, truncated ridge CG, Adam on a "
        "cosine schedule."
    ),
    source="HG-MS paper, section on the algorithm and experiment appendix.",
    of=KeepBest,
    parts={
        "generator": {
            "name": "branches",
            "count": 2,
            "steps": 60,
            "optimizer": {"name": "adamw", "lr": 2e-2, "schedule": {"name": "cosine"}},
            "batch_size": 256,
            "restart_every": 10,
        },
        "selector": {"name": "best-of-n"},
        "hypergradient": {
            "name": "implicit",
            "batch_size": 2500,
            "upper_batch_size": 100,
            "solver": {"name": "cg", "ridge": 2e-2, "rtol": 1e-3, "max_steps": 4},
        },
        "outer": {
            "name": "adam",
            "lr": 0.5,
            "betas": [0.5, 0.999],
            "schedule": {"kind": "cosine", "final": 0.0},
        },
        "keep": "best",
    },
    on={"sources": ONE_STEP},
)

HG_MS_TILTED = Composition(
    name="hg-ms-tilted",
    summary=(
        "HG-MS whose candidates minimise g + εf: drawn from the lower minimisers that "
        "validation favours."
    ),
    source=(
        "HG-MS paper, Algorithm 1; the tilt is Tikhonov's viscosity selection, as in "
        "value-function penalties with 1/γ = ε."
    ),
    of=Tilted,
    parts={**HG_MS.parts, "tilt": 1.0},
)

HG_IMPLICIT = Composition(
    name="hg-implicit",
    summary="HG-MS with one branch: the ablation that isolates the selection.",
    source="HG-MS paper with N = 1; Lorraine et al. 2020 (implicit differentiation).",
    parts={
        **HG_MS.parts,
        "generator": {**HG_MS.parts["generator"], "count": 1},
        "selector": {"name": "first"},
    },
)

HG_BASELINE = Composition(
    name="hg-baseline",
    summary="One branch of AdamW, unrolled: the paper's single-trajectory baseline.",
    source=(
        "HG-MS paper, appendix on data hyper-cleaning (20 AdamW steps at 5e-3, outer AdamW at 0.1)."
    ),
    parts={
        "generator": {
            "name": "branches",
            "count": 1,
            "steps": 20,
            # the paper uses eps_root = 0, with which a start at a stationary point can give a
            # hypergradient of any size
            "optimizer": {"name": "adamw", "lr": 5e-3, "eps_root": 1e-6},
            "batch_size": 256,
            "keep_path": "graph",
        },
        "selector": {"name": "first"},
        "hypergradient": {"name": "unrolled"},
        "outer": {"name": "adamw", "lr": 0.1},
    },
    on={"sources": ONE_BRANCH},
)

HG_MS_TRAJECTORY = Composition(
    name="hg-ms-trajectory",
    summary="HG-MS whose candidates are iterates of one run: selection without a second run.",
    source="this project: HG-MS paper, Algorithm 1, with the candidates of IAPTT-GM.",
    parts={
        **HG_MS.parts,
        "generator": {
            "name": "trajectory",
            "steps": 60,
            "every": 10,
            "optimizer": {"name": "adamw", "lr": 2e-2},
            "batch_size": 256,
        },
    },
)


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [
        HG_MS,
        HG_MS_MIXTURE,
        HG_MS_ULA,
        HG_MS_TILTED,
        HG_IMPLICIT,
        HG_BASELINE,
        HG_MS_TRAJECTORY,
    ]
