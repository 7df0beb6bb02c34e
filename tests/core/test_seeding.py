"""Seeds: streams that do not meet, epochs without repetition, global generators that nobody
touches.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hgms_core import Key


def test_the_derived_seed_depends_on_the_path_alone() -> None:
    assert Key(3).fold("a", 1) == Key(3).fold("a").fold(1)
    # sha256 of "(0, ('noise', 1))": a changed derivation would silently change every published run.
    assert Key(0).fold("noise", 1).derive() == 5186684766827454448


def test_different_paths_give_different_seeds() -> None:
    labels = [(), ("a",), ("b",), ("a", 1), ("a", "1"), (1, "a"), ("a1",)]
    derived = {Key(seed).fold(*path).derive() for seed in range(4) for path in labels}
    assert len(derived) == 4 * len(labels)
    assert all(0 <= each < 2**63 for each in derived)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 6), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_every_epoch_visits_every_row_once(
    size: int, batch_size: int, steps: int, seed: int
) -> None:
    index = Key(seed).indices(size, batch_size, steps)
    assert index.shape == (steps, batch_size)
    for epoch in index.reshape(-1).split(size):
        assert len({*epoch.tolist()} & {*range(size)}) == len(epoch)


def test_two_epochs_differ_and_the_global_generators_are_left_alone() -> None:
    def states() -> list[str]:
        # the legacy global is what must not change
        numpys = np.random.get_state(legacy=False)  # noqa: NPY002
        return [str(torch.get_rng_state().tolist()), str(numpys), str(random.getstate())]

    before = states()
    torch.randn(3, generator=Key(0).generator())
    first, second = Key(0).indices(20, 20, 2)
    assert not torch.equal(first, second)
    assert states() == before
