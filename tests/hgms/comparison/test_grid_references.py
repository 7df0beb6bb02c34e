"""The baselines that a grid adds."""

from __future__ import annotations

import pytest

from hgms.comparison import load
from hgms.facts import innermost

pytestmark = pytest.mark.usefixtures("one_registry")


def test_baselines_take_the_settings_for_all_methods_that_they_have() -> None:
    """`validation-only` has no generator of its own, and uniform has."""
    table = {"budget": "1 step", "task": "quadratic", "method": "hg-implicit", "baselines": True}
    loaded = load(table, sets=["method.generator.steps=7"])
    methods = {label: config.method for (_, label), config in loaded.pairs.items()}
    assert list(methods) == ["hg-implicit", "uniform", "validation-only", "uniform-tilted"]
    assert innermost(methods["uniform"]).generator.generator.steps == 7
    assert innermost(methods["validation-only"]).generator.generator.steps != 7
