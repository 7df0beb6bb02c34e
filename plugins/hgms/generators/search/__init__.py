"""Search without derivatives: method `search`, and its compositions `random-search` and `tpe`."""

from __future__ import annotations

from hgms.generators.search.search import Search as Search
from hgms_core import Composition, hookimpl

RANDOM_SEARCH = Composition(
    name="random-search",
    summary=(
        "Random θ in a box around θ0, the lower level trained from scratch for each: the "
        "zeroth-order floor."
    ),
    source="Bergstra, Bengio, JMLR 2012.",
    of=Search,
    parts={
        "generator": {
            "name": "branches",
            "count": 2,
            "steps": 200,
            "optimizer": {"name": "adamw", "lr": 2e-2, "schedule": {"name": "cosine"}},
            "batch_size": 256,
        },
        "selector": {"name": "best-of-n"},
        "sampler": "random",
    },
    testing={"generator": {"steps": 30, "optimizer": {"lr": 0.1}}},  # for problems of size 1
)

TPE = Composition(
    name="tpe",
    summary=(
        "Optuna's tree-structured Parzen estimator over θ, the lower level trained from "
        "scratch for each proposal."
    ),
    source="Bergstra, Bardenet, Bengio, Kégl, NeurIPS 2011; Akiba et al., KDD 2019 (Optuna).",
    of=Search,
    parts={**RANDOM_SEARCH.parts, "sampler": "tpe"},
    testing=RANDOM_SEARCH.testing,
)


@hookimpl
def hgms_register_methods() -> list[type | Composition]:
    return [Search, RANDOM_SEARCH, TPE]
