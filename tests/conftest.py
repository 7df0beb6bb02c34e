"""Settings all tests share. Being here also makes ``tests/helpers.py`` importable as ``helpers``."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from processes import Server


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


def pytest_configure() -> None:
    """Signals are heard, also by a suite that was started in the background or by nohup, where they are ignored."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
