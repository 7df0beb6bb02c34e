"""Libraries that draw from the global generators get them for a while; afterwards they are as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def borrowed(seed: int) -> Iterator[None]:
    """The global generators of Python, numpy and torch (GPUs too), seeded inside and restored after.

    >>> before = torch.get_rng_state()
    >>> with borrowed(1):
    ...     _ = torch.randn(3)
    >>> torch.get_rng_state().equal(before)
    True
    """
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state of the global one is what is kept
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)  # noqa: NPY002
