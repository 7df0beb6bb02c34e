"""Seeds: streams that do not meet, epochs without repetition, global generators that nobody
touches.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hgms_core import Key


def test_the_same_path_gives_the_same_numbers() -> None:
    a = Key(3).fold("a", 1)
    b = Key(3).fold("a").fold(1)
    assert a == b
    assert torch.equal(
        torch.randn(5, generator=a.generator()), torch.randn(5, generator=b.generator())
    )


def test_the_derived_seed_does_not_depend_on_the_process() -> None:
    # sha256 of "(0, ('noise', 1))": a changed derivation would silently change every published run.
    assert Key(0).fold("noise", 1).derive() == 5186684766827454448


def test_different_paths_give_different_seeds() -> None:
    paths = [
        (seed, *labels)
        for seed in range(4)
        for labels in [(), ("a",), ("b",), ("a", 1), ("a", "1"), (1, "a"), ("a1",)]
    ]
    derived = {Key(seed).fold(*labels).derive() for seed, *labels in paths}
    assert len(derived) == len(paths)
    assert all(0 <= each < 2**63 for each in derived)


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(TypeError, match="seed"):
        Key(1.5)  # type: ignore[arg-type]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 6), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_every_epoch_visits_every_row_once(
    size: int, batch_size: int, steps: int, seed: int
) -> None:
    index = Key(seed).indices(size, batch_size, steps)
    assert index.shape == (steps, batch_size)
    flat = index.reshape(-1)
    for first in range(0, len(flat), size):
        epoch = flat[first : first + size]
        assert len(set(epoch.tolist())) == len(epoch)
        assert int(epoch.min()) >= 0
        assert int(epoch.max()) < size


def test_batches_of_two_epochs_differ() -> None:
    first, second = Key(0).indices(20, 20, 2)
    assert not torch.equal(first, second)


def test_the_global_generators_are_left_alone() -> None:
    def states() -> list[str]:
        # the legacy global is what must not change
        numpys = np.random.get_state(legacy=False)  # noqa: NPY002
        return [str(torch.get_rng_state().tolist()), str(numpys), str(random.getstate())]

    before = states()
    torch.randn(3, generator=Key(0).generator())
    Key(0).indices(10, 3, 5)
    assert states() == before
