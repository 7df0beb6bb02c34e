"""Derivatives of a loss by parts of its rows, and the candidates of a rank."""

from __future__ import annotations

import pytest
from launches import on_ranks

from hgms.distributed.mesh import shape_of

pytestmark = pytest.mark.extended


def test_derivatives_of_a_loss_by_two_parts_are_those_of_the_whole() -> None:
    """Gradients, Hessian products by both modes, mixed products and stacked gradients."""
    on_ranks("derivatives.py", 2, seconds=120)


@pytest.mark.nightly
def test_derivatives_of_a_loss_by_three_parts_are_those_of_the_whole() -> None:
    on_ranks("derivatives.py", 3, seconds=120)


def test_ranks_propose_equally_many_candidates_where_they_compute_together() -> None:
    shapes = [shape_of(4, 6), shape_of(4, 6, even=True), shape_of(2, 3, even=True)]
    assert shapes == [(4, 1), (2, 2), (1, 2)]
