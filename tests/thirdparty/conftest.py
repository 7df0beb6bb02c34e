"""The environment of tests/thirdparty/stranger.py, and each example distribution in turn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock
from stranger import PROJECTS, Stranger, install


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    """The environment, made once however many workers pytest has."""
    home = tmp_path_factory.mktemp("home")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "stranger"
    with FileLock(f"{folder}.lock"):
        if not (folder / "ready").exists():
            folder.mkdir()
            install(folder)
            (folder / "ready").touch()
    return Stranger(folder / "venv", folder / "wheels", home)


@pytest.fixture(params=PROJECTS, ids=lambda path: path.name)
def project(request: pytest.FixtureRequest) -> Path:
    """The folder of one example distribution."""
    spec: Path = request.param
    return spec
