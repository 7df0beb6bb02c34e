"""Trees: stacking, taking rows, norms, and the bijection with flat vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import assert_same, normal

from hgms_core import Ravel, Tree, norm, stack
from hgms_core.trees import take

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4)


def tree_of(shapes: list[tuple[int, ...]], lead: tuple[int, ...] = ()) -> Tree:
    return {f"leaf{i}": normal(*lead, *shape, seed=i) for i, shape in enumerate(shapes)}


@given(shapes)
@settings(max_examples=30, deadline=None)
def test_ravel_is_a_bijection_that_keeps_the_norm(shapes: list[tuple[int, ...]]) -> None:
    tree = tree_of(shapes)
    spec = Ravel.of(tree)
    flat = spec.ravel(tree)
    assert flat.shape == (spec.size,) == (sum(leaf.numel() for leaf in tree.values()),)
    assert_same(spec.unravel(flat), tree)
    torch.testing.assert_close(norm(tree), torch.linalg.vector_norm(flat))
    assert norm({}) == 0


@given(shapes, st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_stacked_tree_ravels_row_by_row(shapes: list[tuple[int, ...]], count: int) -> None:
    stacked = tree_of(shapes, (count,))
    spec = Ravel.of(stacked, batch_dims=1)
    rows = spec.ravel(stacked)
    trees = [take(stacked, i) for i in range(count)]
    assert_same(rows, torch.stack([Ravel.of(tree).ravel(tree) for tree in trees]))
    assert_same(spec.unravel(rows), stacked)
    assert_same(stack(trees), stacked)


@pytest.mark.parametrize("index", [1, torch.tensor(1)])
def test_a_taken_row_is_a_copy(index: int | torch.Tensor) -> None:
    stacked = {"x": normal(3, 2)}
    row = take(stacked, index)
    assert_same(row, {"x": normal(3, 2)[1]})
    row["x"].zero_()
    assert_same(stacked, {"x": normal(3, 2)})
