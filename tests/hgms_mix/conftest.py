"""What makes commands of mixes cheap: each reads the installed plugins several times, collects
garbage, and draws.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pluggy
import pytest

COLLECT = gc.collect
READ_ONCE = functools.cache(importlib.metadata.entry_points)
READERS = ("importlib.metadata.entry_points",)
PARSE = pluggy.PluginManager.parse_hookimpl_opts


@functools.cache
def parsed(project: str, plugin: object, name: str) -> Any:
    """What pluggy says of a name in a plugin."""
    return PARSE(pluggy.PluginManager(project), plugin, name)


@pytest.fixture
def all_garbage() -> None:
    """For tests of what is in memory."""


@pytest.fixture(autouse=True)
def _settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """What was there at a collection of garbage stays: stages collect it between models, and to
    look through torch and transformers each time takes longer than a stage.
    """

    def collect(generation: int = 2) -> int:
        found = COLLECT(generation)
        gc.freeze()
        return found

    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        if "all_garbage" not in request.fixturenames:
            patch.setattr(gc, "collect", collect)
        yield


@pytest.fixture(autouse=True)
def _installed_plugins_are_read_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a test installs plugins of its own. Fixtures of modules read them as usual."""
    if "site" not in request.fixturenames:
        for reader in READERS:
            monkeypatch.setattr(reader, READ_ONCE)
        monkeypatch.setattr(
            pluggy.PluginManager,
            "parse_hookimpl_opts",
            lambda self, plugin, name: parsed(self.project_name, plugin, name),
        )
