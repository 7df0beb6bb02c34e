"""Settings all tests share. Being here also makes ``tests/helpers.py`` importable as ``helpers``."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The tests' tensors are small: threads would only make the times unsteady."""
    torch.set_num_threads(1)
