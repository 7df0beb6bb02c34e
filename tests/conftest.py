"""Settings that all tests share. This file also makes ``tests/support`` importable."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from support.fakes import Site
from support.processes import Server

HERE = Path(__file__).parent
TIERS = {
    "extended": [HERE / "benchmarks", HERE / "ranks", HERE / "thirdparty"],
    "nightly": [HERE / "gpu", HERE / "peers"],
}
"""Folders whose tests all belong to one tier."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The tests' tensors are small: threads would only make the times unsteady."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Token tables are cached in the user's folder; tests have one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HGMS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts `hgms …` in processes of their own."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """No plugin is installed but what the test installs: a distribution called hgms stands
    before the real one.
    """
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import folders whose tests all belong to a tier that ``-m`` excludes, and no
    conftest.py for its docstrings: several have that name.
    """
    if collection_path.name == "conftest.py":
        return True
    excluded = [tier for tier in TIERS if f"not {tier}" in config.option.markexpr]
    return True if any(collection_path in TIERS[tier] for tier in excluded) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected and imported stays: to look for garbage in it again and again takes a third
    of the time, and to look through it later, in every test that collects garbage, takes a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_configure() -> None:
    """Signals are heard, also by a suite that was started in the background or by nohup, where
    they are ignored.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
