"""The plugin that tests of the command line have installed."""

from __future__ import annotations

import pytest
from support.fakes import TOY, Site


@pytest.fixture
def fake(site: Site) -> Site:
    site.module("fake_plugin", TOY)
    site.install("hgms-fake", {"fake": "fake_plugin"}, version="3.0")
    return site
