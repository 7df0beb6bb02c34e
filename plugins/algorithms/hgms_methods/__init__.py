"""HG-MS and what it is compared with, as compositions of parts by name.

A composition is the default configuration of a :class:`hgms_core.Pipeline` (``validation-only``: of a wrapper around one). Any
part or number can be changed where the method is used, e.g. ``--set method.generator.count=8``.
"""

from __future__ import annotations

from typing import Any

from hgms_core import Composition, hookimpl
from hgms_methods.learned_start import LearnedStart as LearnedStart
from hgms_methods.starting_at import StartingAt as StartingAt
from hgms_methods.tilted import Tilted as Tilted
from hgms_methods.validation_only import ValidationOnly as ValidationOnly

HG_MS_ULA = Composition(
    name="hg-ms-ula",
    summary="HG-MS as analysed: best of N Langevin chains at temperature λ, ridge CG with clipping, projected gradient.",
    source="HG-MS paper, Algorithm 1 with Algorithm ULA.",
    parts={
        # Chains start from a Gaussian of deviation √(spread · temperature) = 0.3 around the last selected state. From one point
        # they would spread by √(2 · temperature · lr · steps) = 0.08 a step, too little to find another part of S(θ).
        "generator": {
            "name": "ula", "count": 8, "steps": 60, "lr": 5e-2, "temperature": 1e-3, "spread": 100.0, "carry_rule": "selected",
        },
        "selector": {"name": "best-of-n"},
        "hypergradient": {
            "name": "implicit",
            "solver": {"name": "cg", "ridge": 1e-2, "rtol": 1e-3, "max_steps": 30, "clip": 1e3},
        },
        "outer": {"name": "projected-gradient", "lr": 0.1},
    },
)  # fmt: skip

# On a language model whose sources are weighted: one SGD step a branch, the exact derivative of one more, Adam on the logits
# (the paper's settings for Llama-3-8B and Gemma-2-9B; batch sizes are ours, it gives none).
ONE_STEP: dict[str, Any] = {
    "generator": {
        "name": "branches", "count": 4, "steps": 1, "optimizer": "sgd", "lr": 1e-4, "noise": 1e-5, "batch_size": 16,
        "schedule": "constant", "restart_every": None,
    },
    "hypergradient": {"name": "through-step", "upper_batch_size": 16},
    "selector": {"name": "best-of-n", "batch_size": 16},
    "outer": {"name": "adam", "lr": 0.05, "betas": [0.9, 0.999], "schedule": {"kind": "constant"}},
    "keep": "last",
}  # fmt: skip
ONE_BRANCH: dict[str, Any] = {
    **ONE_STEP,
    "generator": {**ONE_STEP["generator"], "count": 1, "noise": 0.0, "keep_graph": False},
    "selector": {"name": "first"},
}

HG_MS = Composition(
    name="hg-ms",
    summary="HG-MS as practised: best of N optimiser branches, truncated ridge CG, Adam on a cosine schedule.",
    source="HG-MS paper, section on the algorithm and experiment appendix.",
    parts={
        "generator": {
            "name": "branches", "count": 2, "steps": 60, "optimizer": "adamw", "lr": 2e-2, "batch_size": 256,
            "schedule": "cosine", "restart_every": 10,
        },
        "selector": {"name": "best-of-n"},
        "hypergradient": {
            "name": "implicit", "batch_size": 2500, "upper_batch_size": 100,
            "solver": {"name": "cg", "ridge": 2e-2, "rtol": 1e-3, "max_steps": 4},
        },
        "outer": {"name": "adam", "lr": 0.5, "betas": [0.5, 0.999], "schedule": {"kind": "cosine", "final": 0.0}},
        "keep": "best",
    },
    on={"sources": ONE_STEP},
)  # fmt: skip

HG_MS_TILTED = Composition(
    name="hg-ms-tilted",
    summary="HG-MS whose candidates minimise g + εf: drawn from the lower minimisers that validation favours.",
    source="HG-MS paper, Algorithm 1; the tilt is Tikhonov's viscosity selection, as in value-function penalties with 1/γ = ε.",
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
    source="HG-MS paper, appendix on data hyper-cleaning (20 AdamW steps at 5e-3, outer AdamW at 0.1).",
    parts={
        "generator": {
            "name": "branches", "count": 1, "steps": 20, "optimizer": "adamw", "lr": 5e-3, "batch_size": 256,
            "keep_graph": True,
        },
        "selector": {"name": "first"},
        "hypergradient": {"name": "unrolled"},
        "outer": {"name": "adamw", "lr": 0.1},
    },
    on={"sources": ONE_BRANCH},
)  # fmt: skip

IAPTT_GM = Composition(
    name="iaptt-gm",
    summary="IAPTT-GM: unrolls one run up to its worst iterate, and learns where the run starts.",
    source="Liu, Liu, Zeng, Zhang, NeurIPS 2021 (arXiv 2110.00455).",
    of=LearnedStart,
    parts={
        "generator": {"name": "trajectory", "steps": 20, "lr": 3e-2, "batch_size": 256, "keep_graph": True},
        "selector": {"name": "worst"},
        "hypergradient": {"name": "unrolled"},
        "outer": {"name": "split", "upper": {"name": "adam", "lr": 0.1}, "start": {"name": "sgd", "lr": 3e-2}},
        "learn_start": True,
        "answer": "last",
    },
    testing={"generator": {"lr": 0.3}},
)

HG_MS_TRAJECTORY = Composition(
    name="hg-ms-trajectory",
    summary="HG-MS whose candidates are iterates of one run: selection without a second run.",
    source="this project: HG-MS paper, Algorithm 1, with the candidates of IAPTT-GM.",
    parts={
        **HG_MS.parts,
        "generator": {
            "name": "trajectory", "steps": 60, "every": 10, "optimizer": "adamw", "lr": 2e-2, "batch_size": 256,
        },
    },
)  # fmt: skip

FIXED_POINT = Composition(
    name="fixed-point",
    summary="One warm-started SGD run, then as many fixed-point steps on the linear system.",
    source="Grazzi, Franceschi, Pontil, Salzo, ICML 2020 (arXiv 2006.16218).",
    parts={
        "generator": {"name": "branches", "count": 1, "steps": 20, "lr": 0.1, "batch_size": 256},
        "selector": {"name": "first"},
        "hypergradient": {
            "name": "implicit", "batch_size": 2500,
            "solver": {"name": "fixed-point", "lr": 0.1, "max_steps": 20},
        },
        "outer": {"name": "adam", "lr": 0.1},
    },
)  # fmt: skip

AMIGO = Composition(
    name="amigo",
    summary="Few SGD steps on the lower level and few on the linear system, both from where they last ended.",
    source="Arbel, Mairal, ICLR 2022 (arXiv 2111.14580).",
    parts={
        "generator": {"name": "branches", "count": 1, "steps": 10, "lr": 0.1, "batch_size": 256},
        "selector": {"name": "first"},
        "hypergradient": {
            "name": "implicit", "batch_size": 256, "upper_batch_size": 256, "batches": "fresh", "warm_start": True,
            "solver": {"name": "fixed-point", "lr": 0.1, "max_steps": 10},
        },
        "outer": {"name": "adam", "lr": 0.1},
    },
)  # fmt: skip

STOCBIO = Composition(
    name="stocbio",
    summary="Warm-started SGD and a Neumann series, each of whose products has a batch of its own.",
    source="Ji, Yang, Liang, ICML 2021 (arXiv 2010.07962).",
    parts={
        "generator": {"name": "branches", "count": 1, "steps": 10, "lr": 0.1, "batch_size": 256},
        "selector": {"name": "first"},
        "hypergradient": {
            "name": "implicit", "batch_size": 256, "upper_batch_size": 256, "batches": "fresh",
            "solver": {"name": "neumann", "lr": 0.1, "steps": 10},
        },
        "outer": {"name": "adam", "lr": 0.1},
    },
)  # fmt: skip

DARTS = Composition(
    name="darts",
    summary="One lower step, then the derivative of one more by a finite difference: first order, no Hessian.",
    source="Liu, Simonyan, Yang, ICLR 2019 (arXiv 1806.09055), second-order approximation.",
    parts={
        "generator": {"name": "branches", "count": 1, "steps": 1, "lr": 2.5e-2, "momentum": 0.9, "batch_size": 256},
        "selector": {"name": "first"},
        "hypergradient": {
            "name": "one-step", "lr": 2.5e-2, "derivative": "difference", "batch_size": 256, "upper_batch_size": 256,
        },
        "outer": {"name": "adam", "lr": 0.1, "betas": [0.5, 0.999]},
    },
    testing={"generator": {"lr": 0.5}, "hypergradient": {"lr": 0.5}},  # for losses of size 1
)  # fmt: skip

STAYS = {"optimum": "its θ stays where it is"}

UNIFORM = Composition(
    name="uniform",
    summary="Trains the lower level at the initial θ (equal weights): the floor of every comparison.",
    source="no bilevel optimisation.",
    parts={
        "generator": {**HG_MS.parts["generator"], "count": 1},
        "selector": {"name": "first"},
        "hypergradient": {"name": "fixed"},
        "outer": {"name": "sgd"},
        "keep": "best",
    },
    on={"sources": {**ONE_BRANCH, "hypergradient": {"name": "fixed", "upper_batch_size": 16}, "outer": {"name": "sgd"}}},
    testing_failures=STAYS,
)

UNIFORM_TILTED = Composition(
    name="uniform-tilted",
    summary="Trains the lower level g + εf at the initial θ: joint training on training and validation rows, nothing learned.",
    source="no bilevel optimisation; the reference of hg-ms-tilted.",
    of=Tilted,
    parts={**UNIFORM.parts, "tilt": HG_MS_TILTED.parts["tilt"]},
    on=UNIFORM.on,
    testing_failures=STAYS,
)

VALIDATION_ONLY = Composition(
    name="validation-only",
    summary="Trains the lower variables on validation rows alone (roles differentiate and select), at the initial θ.",
    source="no bilevel optimisation; the limit of uniform-tilted as ε → ∞.",
    of=ValidationOnly,
    parts={"method": {"name": "uniform"}},
    testing_failures=STAYS,
)

FIXED = Composition(
    name="fixed",
    summary="Keeps a given mixture of named sources (its field `mixture`): what a hand-made or published mixture is worth.",
    source="no bilevel optimisation.",
    of=StartingAt,
    parts={**UNIFORM.parts, "generator": ONE_BRANCH["generator"], "mixture": {}},
    on=UNIFORM.on,
    testing={"mixture": {"near": 1.0}},
)

ORACLE_CLEAN = Composition(
    name="oracle-clean",
    summary="Trains on the uncorrupted examples only, as if somebody had told which they are: the ceiling.",
    source="no bilevel optimisation; needs a task that knows the truth (its reference θ 'clean').",
    of=StartingAt,
    parts={**UNIFORM.parts, "reference": "clean"},
)

ORACLE_JOINT = Composition(
    name="oracle-joint",
    summary="Trains on the uncorrupted examples and the validation rows together: the ceiling of methods that train on both.",
    source="no bilevel optimisation; needs a task that knows the truth (its reference θ 'clean').",
    of=Tilted,
    parts={**ORACLE_CLEAN.parts, "tilt": HG_MS_TILTED.parts["tilt"]},
)


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [
        HG_MS,
        HG_MS_ULA,
        HG_MS_TILTED,
        HG_IMPLICIT,
        HG_BASELINE,
        HG_MS_TRAJECTORY,
        IAPTT_GM,
        FIXED_POINT,
        AMIGO,
        STOCBIO,
        DARTS,
        UNIFORM,
        FIXED,
        ORACLE_CLEAN,
        UNIFORM_TILTED,
        ORACLE_JOINT,
        VALIDATION_ONLY,
    ]
