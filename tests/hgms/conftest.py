"""Fixtures of the programs' tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes import TOY, Site
from support.run_folders import write_comparison, write_mixtures

from hgms import report
from hgms.plugins import Registry


@pytest.fixture(autouse=True)
def settled() -> None:
    """What is there before a test stays. Every run of a comparison collects garbage before its
    memory is measured, and to look through torch and pytest each time takes longer than the run.
    """
    gc.freeze()


@pytest.fixture
def bowl(site: Site) -> Path:
    """The plugin of ``grid_plugin.py``, the only one that is installed; its path."""
    site.install("hgms-bowl", {"bowl": "support.grid_plugin"})
    return Path(__file__).parents[1] / "support" / "grid_plugin.py"


@pytest.fixture(scope="module")
def one_registry() -> Iterator[None]:
    """All plugins are loaded once for a module whose tests change none: each call of `compare`
    would load them again, which takes longer than its runs."""
    registry = Registry.load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "load", lambda *_: registry)
        yield


@pytest.fixture
def fake(site: Site) -> Site:
    """The toy plugin is installed."""
    site.module("fake_plugin", TOY)
    site.install("hgms-fake", {"fake": "fake_plugin"}, version="3.0")
    return site


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a made comparison, and its study."""
    return write_comparison(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="session")
def study(comparison: Path) -> report.Study:
    return report.build([comparison])


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> report.Study:
    """Of a made comparison of mixtures."""
    folder = write_mixtures(tmp_path_factory.mktemp("mixtures"), sources=10)
    return report.build([folder])
