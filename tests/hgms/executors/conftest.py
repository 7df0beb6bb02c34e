"""The home of Ray, which ends with each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray keeps its token in the home folder, and reads it once in a process."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    yield
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()
