"""Suggestions for misspelt and moved configuration keys."""

from __future__ import annotations

import pytest

from hgms.config.convert import structure
from hgms.plugins import KINDS, Registry
from hgms_core.errors import ConfigError

CASES = [
    ("generator", "value-gap", "gamma_steps", "ramp.steps"),
    ("generator", "gradient-norm", "gamma_start", "ramp.start"),
    ("generator", "minimax", "stage_factor", "stages.factor"),
    ("generator", "branches", "weight_decy", "optimizer.weight_decay"),
    ("generator", "branches", "lr", "optimizer.lr"),
    ("generator", "branches", "floor", "optimizer.schedule.floor"),
    ("generator", "branches", "step", "steps"),
    ("generator", "branches", "zzz", None),
    ("task", "hyper-cleaning", "theta0", "start.theta0"),
    ("method", "less", "projection_seed", "projection.seed"),
    ("method", "rho-loss", "reference_lr", "reference.lr"),
    ("method", "hg-ms", "tlt", "tilt"),
]


@pytest.mark.parametrize(("kind", "name", "key", "place"), CASES)
def test_the_nearest_key_is_suggested_with_its_table(
    kind: str, name: str, key: str, place: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        structure({"name": name, key: 3}, KINDS[kind].protocol, Registry.load())
    (error,) = [error for error in caught.value.errors if error.code == "unknown-option"]
    assert (error.place, error.did_you_mean) == ((key,), () if place is None else (place,))
