"""Fixtures of the core's tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import Site


@pytest.fixture(scope="session", autouse=True)
def settled() -> None:
    """What is imported stays. Every run of a comparison collects garbage before its memory is measured, and to look through all
    of torch each time takes longer than a test's runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """No plugin is installed but what the test installs: a distribution called hgms stands before the real one."""
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(root)
    for variable in ("HGMS_PLUGINS", "HGMS_DISABLE_PLUGINS", "HGMS_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    fake = Site(root)
    extra = ['no-such-module>=1; extra == "sklearn"']
    fake.install("hgms", {}, version="0.1.0", extras=["sklearn"], requires=extra)
    yield fake
    for name in [key for key in sys.modules if key in fake.modules or key.startswith("hgms_file_")]:
        del sys.modules[name]


@pytest.fixture
def bowl(site: Site) -> Path:
    """The plugin of ``grid_plugin.py``, the only one that is installed; its path."""
    site.install("hgms-bowl", {"bowl": "grid_plugin"})
    return Path(__file__).parent / "grid_plugin.py"
