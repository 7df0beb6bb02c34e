"""Worker processes, in this process: jobs as lines."""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hgms.executors import worker
from hgms_core import ConfigError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it wakes a thread by a signal")


MAIN = threading.main_thread().ident or 0


class Ended(BaseException):
    """Stands for the end of this process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The codes with which this process would have ended: of the listening thread, and then of
    the main one, which that wakes by Ctrl-C."""
    codes: list[int] = []
    left = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        if threading.current_thread() is threading.main_thread():
            left.set()
            raise Ended
        signal.pthread_kill(MAIN, signal.SIGINT)
        # A signal that arrives just before the main thread sleeps does not wake it.
        while not left.wait(5):
            signal.pthread_kill(MAIN, signal.SIGINT)

    monkeypatch.setattr(worker.os, "_exit", leave)
    threads = torch.get_num_threads()
    yield codes
    torch.set_num_threads(threads)


def acts(arguments: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    if arguments.get("raises") == "ours":
        raise ConfigError("missing-file", "no such data", place=("train.jsonl",))
    if arguments.get("raises") == "Ctrl-C":
        raise KeyboardInterrupt
    tell(event="step", share=0.5)
    return {"number": arguments["number"], "threads": torch.get_num_threads()}


def lines(*arguments: Mapping[str, Any]) -> Iterator[str]:
    """As standard input: it closes when each job had its ending."""
    for each in arguments:
        yield json.dumps({"function": "test_worker:acts", "arguments": each})


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_each_job_ends_with_its_outcome_or_its_error_and_the_next_one_follows(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Mapping[str, Any]] = []
    idle = threading.Event()

    class Lines(queue.Queue[str]):
        def get(self, *args: Any) -> str:
            if sum(each["event"] != "step" for each in told) == 5:
                idle.set()
            return super().get(*args)

    def tell(**event: Any) -> None:
        told.append(event)

    def source() -> Iterator[str]:
        yield from lines({"number": 1}, {"raises": "ours"}, {})
        yield from lines({"raises": "Ctrl-C"}, {"number": 2})
        # Input that ended earlier would interrupt the last job of this process.
        assert idle.wait(60)

    monkeypatch.setattr(worker.queue, "Queue", Lines)
    with pytest.raises(Ended):
        worker._serve(source(), tell, 1)  # type: ignore[arg-type]
    assert ends == [0, 0]
    assert [each["event"] for each in told] == [
        *("step", "ended", "ended", "step", "ended", "interrupted", "step", "ended")
    ]
    assert [each["outcome"] for each in told if "outcome" in each] == [
        {"number": number, "threads": 1} for number in (1, 2)
    ]
    errors = [each["error"] for each in told if "error" in each]
    assert [(each["class"], each["code"]) for each in errors] == [
        ("ConfigError", "missing-file"),
        ("HgmsError", "unexpected-error"),
    ]
