"""Every generator passes the kit's checks of numbers: repeats, costs, replay, carry, resume."""

from __future__ import annotations

from typing import Any

import pytest
from support.conformance import faults

from hgms.generators.branches import Trajectory
from hgms.generators.penalty import (
    DynamicBarrier,
    FullyFirstOrder,
    GradientNorm,
    Minimax,
    MoreauEnvelope,
    ValueFree,
    ValueGap,
)
from hgms.generators.single_loop import Soba
from hgms.generators.ula import Ula

GENERATORS = [
    Trajectory(steps=4),
    Ula(count=3, steps=4),
    Soba(),
    ValueGap(steps=2),
    GradientNorm(),
    Minimax(),
    DynamicBarrier(steps=2),
    FullyFirstOrder(steps=2),
    MoreauEnvelope(),
    ValueFree(steps=2),
]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda each: each.name)
def test_a_generator_passes_the_checks_of_the_kit(generator: Any) -> None:
    assert faults(generator) == {}
