"""HG-MS with cross-fitted branches: weights from held-out losses, learned by averaged
hypergradients.
"""

from __future__ import annotations

from hgms.methods.crossfit.crossfit import CrossFit as CrossFit
from hgms.methods.crossfit.flat import FlatBranches as FlatBranches
from hgms.methods.crossfit.lower import SharpnessAware as SharpnessAware
from hgms_core import Composition, hookimpl

HG_MS_CROSSFIT = Composition(
    name="hg-ms-crossfit",
    summary=(
        "HG-MS with folds of rows: weights from out-of-fold losses, learned by their "
        "averaged hypergradient."
    ),
    source="this project: HG-MS paper, Algorithm 1, with cross-fitted candidates.",
    of=CrossFit,
    parts={
        "hypergradient": {
            "name": "implicit",
            "strategy": "jvp",
            "batch_size": 1000,
            "solver": {"name": "cg", "ridge": 1e-2, "max_steps": 6},
        },
        "outer": {"name": "adam", "lr": 0.05, "betas": [0.8, 0.95]},
        "selector": {"name": "best-of-n"},
    },
    testing={"warmup": 20, "steps": 5},  # problems of size 1 need fewer steps
)


@hookimpl
def hgms_register_generators() -> list[type]:
    return [FlatBranches]


@hookimpl
def hgms_register_methods() -> list[type | Composition]:
    return [CrossFit, HG_MS_CROSSFIT]
