"""Fields of tasks that are out of range are errors with a code and a place."""

from __future__ import annotations

from typing import Any

import pytest
from support.helpers import rejects

from hgms.tasks.circle import CircleDegenerate, CircleKink
from hgms.tasks.cleaning import HyperCleaning
from hgms.tasks.imbalanced import Adjustment, ImbalancedLoss, Layers
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.regression import LogisticCv, RidgeCv
from hgms.tasks.sphere import Sphere
from hgms_core import ConfigError


@pytest.mark.parametrize(
    ("task", "fields", "code", "place"),
    [
        (CircleKink, {"low": 2.0, "high": 1.0, "start": 2.0}, "out-of-range", "high"),
        (CircleKink, {"start": 4.0}, "out-of-range", "start"),
        (CircleDegenerate, {"start": 4.0}, "out-of-range", "start"),
        (CircleDegenerate, {"b": 0.0}, "out-of-range", "b"),
        (Sphere, {"k": 3, "d": 3}, "out-of-range", "d"),
        (Sphere, {"k": 0}, "out-of-range", "k"),
        (Sphere, {"growth": 1.6}, "out-of-range", "alpha"),
        (Sphere, {"growth": 0.6, "shift": 0.0}, "out-of-range", "growth"),
        (Quadratic, {"rows": 5, "features": 6}, "out-of-range", "features"),
        (Quadratic, {"noise": -1.0}, "out-of-range", "noise"),
        (Quadratic, {"condition": 0.5}, "out-of-range", "condition"),
        (Quadratic, {"penalty": "both"}, "unknown-choice", "penalty"),
        (RidgeCv, {"dataset": "sklearn:boston"}, "wrong-value", "dataset"),
        (LogisticCv, {"dataset": "libsvm:"}, "wrong-value", "dataset"),
        (RidgeCv, {"shares": (0.5, 0.5, 0.5)}, "wrong-value", "shares"),
        (LogisticCv, {"shares": (1.0, 0.0, 0.0)}, "wrong-value", "shares"),
        (RidgeCv, {"bound": 0.0}, "out-of-range", "bound"),
        (LogisticCv, {"bound": 0.0}, "out-of-range", "bound"),
        (ImbalancedLoss, {"dataset": "minst"}, "wrong-value", "dataset"),
        (ImbalancedLoss, {"ratio": 0.0}, "out-of-range", "ratio"),
        (ImbalancedLoss, {"least": -1}, "out-of-range", "least"),
        (Layers, {"channels": (3, 0)}, "wrong-value", "channels"),
        (Adjustment, {"bound_gamma": 1.0}, "out-of-range", "bound_gamma"),
        (ImbalancedLoss, {"validation_split": (0.5, 0.5)}, "wrong-length", "validation_split"),
        (HyperCleaning, {"dataset": "minst"}, "wrong-value", "dataset"),
        (HyperCleaning, {"dataset": "idx:"}, "wrong-value", "dataset"),
        (HyperCleaning, {"corruption": 1.2}, "out-of-range", "corruption"),
        (HyperCleaning, {"noise": "flip"}, "unknown-choice", "noise"),
        (HyperCleaning, {"train_size": 0}, "out-of-range", "train_size"),
        (HyperCleaning, {"validation_split": (0.5, 0.5)}, "wrong-length", "validation_split"),
        (HyperCleaning, {"validation_split": (0.5, 0.5, 0.5)}, "wrong-value", "validation_split"),
        (
            HyperCleaning,
            {"validation_split": (1.5, -0.25, -0.25)},
            "wrong-value",
            "validation_split",
        ),
    ],
)
def test_a_field_out_of_range_is_named(
    task: Any, fields: dict[str, object], code: str, place: str
) -> None:
    with rejects(code, place, of=ConfigError):
        task(**fields)
