"""Methods of other papers as parts of a pipeline: they differentiate the path of one run, or its
implicit function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms.methods.bounded_curvature import BoundedCurvature
from hgms.methods.hg_ms import HG_BASELINE
from hgms.methods.learned_start import LearnedStart
from hgms_core import Composition, hookimpl

STABLE = 1.5
"""The largest product of a lower rate and the curvature at the start. Gradient descent diverges
above 2; the rest is for batches, and for curvature that grows during the run.
"""


def _one_run(
    name: str,
    summary: str,
    source: str,
    generator: Mapping[str, Any],
    hypergradient: Mapping[str, Any],
    stable: float = STABLE,
    **more: Any,
) -> Composition:
    """Compose one run that starts at the end of the previous run, an estimator, and Adam for θ.

    The curvature is bounded for SGD; steps of AdamW do not depend on the scale of g.
    """
    run = {"name": "branches", "count": 1, **generator, "batch_size": 256}
    outer = {"name": "adam", "lr": 0.1, **more.pop("outer", {})}
    parts: dict[str, Any] = {
        "generator": run,
        "selector": {"name": "first"},
        "hypergradient": hypergradient,
        "outer": outer,
    }
    optimizer = generator["optimizer"]
    if optimizer["name"] == "sgd":
        parts["max_curvature"] = stable / optimizer["lr"]
        more["of"] = BoundedCurvature
    return Composition(name=name, summary=summary, source=source, parts=parts, **more)


IAPTT_GM = Composition(
    name="iaptt-gm",
    summary="IAPTT-GM: unrolls one run up to its worst iterate, and learns where the run starts.",
    source="Liu, Liu, Zeng, Zhang, NeurIPS 2021 (arXiv 2110.00455).",
    of=LearnedStart,
    parts={
        "generator": {
            "name": "trajectory",
            "steps": 20,
            "optimizer": {"name": "sgd", "lr": 3e-2},
            "batch_size": 256,
            "keep_path": "graph",
        },
        "selector": {"name": "worst"},
        "hypergradient": {"name": "unrolled"},
        "outer": {
            "name": "split",
            "upper": {"name": "adam", "lr": 0.1},
            "start": {"name": "sgd", "lr": 3e-2, "clip": 10.0},
        },
        "learn_start": True,
        "answer": "last",
        "max_curvature": STABLE / 3e-2,
    },
    testing={"generator": {"optimizer": {"lr": 0.3}}},
)

FIXED_POINT = _one_run(
    "fixed-point",
    "One warm-started SGD run, then as many fixed-point steps on the linear system.",
    "Grazzi, Franceschi, Pontil, Salzo, ICML 2020 (arXiv 2006.16218).",
    {"steps": 20, "optimizer": {"name": "sgd", "lr": 0.1}},
    {
        "name": "implicit",
        "batch_size": 2500,
        "solver": {"name": "fixed-point", "lr": 0.1, "max_steps": 20},
    },
)

AMIGO = _one_run(
    "amigo",
    (
        "Few SGD steps on the lower level and few on the linear system, both from where they last "
        "ended."
    ),
    "Arbel, Mairal, ICLR 2022 (arXiv 2111.14580).",
    {"steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}},
    {
        "name": "implicit",
        "batch_size": 256,
        "upper_batch_size": 256,
        "batches": "fresh",
        "warm_start": True,
        "solver": {"name": "fixed-point", "lr": 0.1, "max_steps": 10},
    },
)

STOCBIO = _one_run(
    "stocbio",
    "Warm-started SGD and a Neumann series, with a separate batch per product.",
    "Ji, Yang, Liang, ICML 2021 (arXiv 2010.07962).",
    {"steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}},
    {
        "name": "implicit",
        "batch_size": 256,
        "upper_batch_size": 256,
        "batches": "fresh",
        "solver": {"name": "neumann", "lr": 0.1, "steps": 10},
    },
)

DARTS = _one_run(
    "darts",
    (
        "One lower step, then the derivative of one more by a finite difference: first order, no "
        "Hessian."
    ),
    "Liu, Simonyan, Yang, ICLR 2019 (arXiv 1806.09055), second-order approximation.",
    {"steps": 1, "optimizer": {"name": "sgd", "lr": 2.5e-2, "momentum": 0.9}},
    {
        "name": "one-step",
        "lr": 2.5e-2,
        "derivative": "difference",
        "batch_size": 256,
        "upper_batch_size": 256,
    },
    stable=0.5,  # momentum repeats steps of an earlier θ; with 1.5, one run of 96 diverged
    outer={"betas": [0.5, 0.999]},
    # for losses of size 1
    testing={"generator": {"optimizer": {"lr": 0.5}}, "hypergradient": {"lr": 0.5}},
)

SAMA = _one_run(
    "sama",
    (
        "Few AdamW steps, then the derivative of one more through Adam's own update, by "
        "first-order gradients alone."
    ),
    "Choe et al., NeurIPS 2023 (arXiv 2310.05674).",
    {"steps": 10, "optimizer": {"name": "adamw", "lr": 5e-3}},
    {"name": "sama", "lr": 5e-3, "displacement": 1.0, "batch_size": 256, "upper_batch_size": 256},
    # for losses of size 1
    testing={
        "generator": {"optimizer": {"lr": 0.5}},
        "hypergradient": {"lr": 0.5, "displacement": 0.01},
    },
)

MIXFLOW = Composition(
    name="mixflow",
    summary=(
        "One branch of AdamW, unrolled by mixed-mode differentiation: `hg-baseline` in the "
        "memory of one graph."
    ),
    source="Kemaev et al., ICML 2025 (arXiv 2505.00793).",
    parts={
        **HG_BASELINE.parts,
        "generator": {**HG_BASELINE.parts["generator"], "keep_path": "states"},
        "hypergradient": {"name": "unrolled", "backward": "mixed"},
    },
    on=HG_BASELINE.on,
)


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [IAPTT_GM, FIXED_POINT, AMIGO, STOCBIO, DARTS, SAMA, MIXFLOW]
