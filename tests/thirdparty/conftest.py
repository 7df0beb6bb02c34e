"""The environment of tests/thirdparty/stranger.py, and each example distribution in turn."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from plugin_mistakes import ENVIRONMENT
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


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host that has loaded nothing yet, and a folder on the path to write modules into."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]
