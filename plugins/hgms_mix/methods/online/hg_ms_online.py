"""HG-MS while the final model trains, and the same training without learning."""

from __future__ import annotations

from hgms_core import Composition

HG_MS_ONLINE = Composition(
    name="hg-ms-online",
    summary=(
        "HG-MS for weights of data sources while the model trains: rows by weight, aligned "
        "mean gradients, dual averaging."
    ),
    source=(
        "HG-MS paper, section on language models; the cosines of LESS (Xia et al. 2024); Xiao 2010."
    ),
    parts={
        "generator": {"name": "mixture-branches", "count": 1, "steps": 2, "schedule": "linear"},
        "selector": {"name": "first"},
        "hypergradient": {"name": "aligned-means", "upper_batch_size": 16},
        "outer": {"name": "dual-averaging", "strength": 40.0, "prior_steps": 2.0, "decay": 0.5},
        "keep": "last",
    },
    testing={"generator": {"lr": 0.05}},
)

UNIFORM_ONLINE = Composition(
    name="uniform-online",
    summary=(
        "Train as hg-ms-online with the fixed first mixture; with a tilt, validation rows are "
        "included."
    ),
    source="no bilevel optimisation; the reference of hg-ms-online.",
    role="floor",
    parts={
        "generator": HG_MS_ONLINE.parts["generator"],
        "selector": {"name": "first"},
        "hypergradient": {"name": "fixed", "upper_batch_size": 1},
        "outer": {"name": "sgd"},
        "keep": "last",
    },
    testing=HG_MS_ONLINE.testing,
    testing_failures={"optimum": "its θ stays where it is"},
)
