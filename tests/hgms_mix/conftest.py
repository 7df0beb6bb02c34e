"""What makes commands of mixes cheap: each reads the installed plugins several times, and draws."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from pathlib import Path

import pytest

READ_ONCE = functools.cache(importlib.metadata.entry_points)
READERS = (
    "importlib.metadata.entry_points",
    "hgms.config.parts.entry_points",
    "hgms_mix.lm.model_names.entry_points",
)


@pytest.fixture(autouse=True)
def _installed_plugins_are_read_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a test installs plugins of its own. Fixtures of modules read them as usual."""
    if "site" not in request.fixturenames:
        for reader in READERS:
            monkeypatch.setattr(reader, READ_ONCE)


@pytest.fixture(autouse=True)
def _no_picture_of_the_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than to find a finished mix. Mixes of fixtures of modules have theirs."""

    def mixture(records: object, path: Path) -> Path:
        return path

    if "hgms_mix.stages.pictures" in sys.modules:
        monkeypatch.setattr("hgms_mix.stages.pictures.mixture", mixture)
