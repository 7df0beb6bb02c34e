"""References for comparisons: θ keeps its initial value, and x is trained at this θ."""

from __future__ import annotations

from attrs import evolve

from hgms.methods.hg_ms import HG_MS, HG_MS_TILTED, ONE_BRANCH
from hgms.methods.initial_theta import StartingAt
from hgms.methods.random_theta import RandomTheta
from hgms.methods.reweighting import OutOfFoldFilter
from hgms.methods.tilt import Tilted
from hgms.methods.validation_only import ValidationOnly
from hgms_core import Composition, hookimpl

STAYS = {"optimum": "its θ stays where it is"}

UNIFORM = Composition(
    name="uniform",
    summary=(
        "Trains the lower level at the initial θ (equal weights): the floor of every comparison."
    ),
    source="no bilevel optimisation.",
    role="floor",
    parts={
        "generator": {**HG_MS.parts["generator"], "count": 1},
        "selector": {"name": "first"},
        "hypergradient": {"name": "fixed"},
        "outer": {"name": "sgd"},
        "keep": "best",
    },
    on={
        "sources": {
            **ONE_BRANCH,
            "hypergradient": {"name": "fixed", "upper_batch_size": 16},
            "outer": {"name": "sgd"},
        }
    },
    testing_failures=STAYS,
)

THETA0 = evolve(
    UNIFORM,
    name="theta0",
    summary=(
        "The same as uniform, for θ that are no weights: trains the lower level at the initial θ."
    ),
)

RANDOM_THETA = Composition(
    name="random-theta",
    summary=(
        "Trains the lower level at a θ drawn once around the initial one (for weights: at "
        "random logits), nothing learned."
    ),
    source="no bilevel optimisation.",
    role="floor",
    of=RandomTheta,
    parts={**UNIFORM.parts, "theta_deviation": 1.0},
    on=UNIFORM.on,
    testing_failures=STAYS,
)

UNIFORM_TILTED = Composition(
    name="uniform-tilted",
    summary=(
        "Trains the lower level g + εf at the initial θ: joint training on training and "
        "validation rows, nothing learned."
    ),
    source="no bilevel optimisation; the reference of hg-ms-tilted.",
    role="floor",
    of=Tilted,
    parts={**UNIFORM.parts, "tilt": HG_MS_TILTED.parts["tilt"]},
    on=UNIFORM.on,
    testing_failures=STAYS,
)

VALIDATION_ONLY = Composition(
    name="validation-only",
    summary=(
        "Trains the lower variables on validation rows alone (roles differentiate and "
        "select), at the initial θ."
    ),
    source="no bilevel optimisation; the limit of uniform-tilted as ε → ∞.",
    role="floor",
    of=ValidationOnly,
    parts={"method": {"name": "uniform"}},
    testing_failures=STAYS,
)

OUT_OF_FOLD_FILTER = Composition(
    name="out-of-fold-filter",
    summary=(
        "Removes lower rows that models of other rows find improbable, then trains like "
        "uniform-tilted on the kept rows."
    ),
    source="no bilevel optimisation; Brodley and Friedl 1999.",
    role="floor",
    of=OutOfFoldFilter,
    parts={"method": {"name": "uniform-tilted"}},
)

FIXED = Composition(
    name="fixed",
    summary=(
        "Keeps a given mixture of named sources (its field `mixture`), to measure a manual or "
        "published mixture."
    ),
    source="no bilevel optimisation.",
    role="floor",
    of=StartingAt,
    parts={**UNIFORM.parts, "generator": ONE_BRANCH["generator"], "mixture": {}},
    on=UNIFORM.on,
    testing={"mixture": {"near": 1.0}},
)

ORACLE_CLEAN = Composition(
    name="oracle-clean",
    summary=(
        "Trains on the uncorrupted examples only, as if somebody had told which they are: "
        "the ceiling."
    ),
    source="no bilevel optimisation; needs a task that knows the truth (its reference θ 'clean').",
    role="ceiling",
    of=StartingAt,
    parts={**UNIFORM.parts, "reference": "clean"},
    on=UNIFORM.on,
)

ORACLE_JOINT = Composition(
    name="oracle-joint",
    summary=(
        "Trains on the uncorrupted examples and the validation rows together: the ceiling of "
        "methods that train on both."
    ),
    source="no bilevel optimisation; needs a task that knows the truth (its reference θ 'clean').",
    role="ceiling",
    of=Tilted,
    parts={**ORACLE_CLEAN.parts, "tilt": HG_MS_TILTED.parts["tilt"]},
    on=UNIFORM.on,
)


@hookimpl
def hgms_register_methods() -> list[Composition]:
    return [
        UNIFORM,
        THETA0,
        RANDOM_THETA,
        FIXED,
        ORACLE_CLEAN,
        UNIFORM_TILTED,
        ORACLE_JOINT,
        VALIDATION_ONLY,
        OUT_OF_FOLD_FILTER,
    ]
