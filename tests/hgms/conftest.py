"""Fixtures of the programs' tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.fakes import Site


@pytest.fixture(scope="session", autouse=True)
def settled() -> None:
    """What is imported stays. Every run of a comparison collects garbage before its memory is
    measured, and to look through all of torch each time takes longer than a test's runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def bowl(site: Site) -> Path:
    """The plugin of ``grid_plugin.py``, the only one that is installed; its path."""
    site.install("hgms-bowl", {"bowl": "support.grid_plugin"})
    return Path(__file__).parents[1] / "support" / "grid_plugin.py"
