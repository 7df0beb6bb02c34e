"""Executors by name: what plugins register, and what is wrong with it."""

from __future__ import annotations

import pytest
from support.fakes import Site
from support.helpers import rejects

from hgms.executors.lookup import HOOK, executor_classes
from hgms.plugins import Host
from hgms_core.errors import PluginError

SOURCE = """
from hgms_core import hookimpl

class Good:
    name = "good"
    def carry_out(self, jobs, report): ...
    def close(self): ...

class Nameless:
    carry_out = close = None

class Open:
    name = "open"
    def carry_out(self, jobs, report): ...

@hookimpl
def hgms_register_executors():
    return {listed}
"""


def host_of(site: Site, listed: str) -> Host:
    site.module("executing", SOURCE.format(listed=listed))
    site.install("hgms-executing", {"executing": "executing"})
    return Host.load()


@pytest.mark.parametrize("odd", ["Nameless", "Open", "3"])
def test_what_is_no_executor_is_blamed_on_its_plugin_and_the_others_stay(
    site: Site, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    host = host_of(site, f"[{odd}, Good]")
    assert sorted(executor_classes(host)) == ["good"]
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    with rejects("wrong-plugin", HOOK, of=PluginError):
        executor_classes(Host.load())


@pytest.mark.parametrize(
    ("listed", "code"),
    [("Good", "wrong-hook-result"), ("None", "wrong-hook-result"), ("1 / 0", "plugin-failed")],
)
def test_a_hook_that_fails_is_blamed_on_its_plugin(
    site: Site, monkeypatch: pytest.MonkeyPatch, listed: str, code: str
) -> None:
    host = host_of(site, listed)
    assert executor_classes(host) == {}
    assert host.infos["executing"].status == "incomplete"
    monkeypatch.setenv("HGMS_STRICT_PLUGINS", "1")
    with rejects(code, *([HOOK] if code == "wrong-hook-result" else []), of=PluginError):
        executor_classes(Host.load())
