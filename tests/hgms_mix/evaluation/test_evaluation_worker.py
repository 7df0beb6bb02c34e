"""The process that compares answers, in this process: a verdict a line, whatever goes wrong."""

from __future__ import annotations

import io
import json
import logging
import resource
import signal
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from hgms_mix.evaluation import worker

math_verify = pytest.importorskip("math_verify", reason="math-verify is not installed: hgms[llm]")


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Limits of memory, which are only noted; handlers of signals and of the log come back."""
    limit = Mock()
    monkeypatch.setattr(resource, "setrlimit", limit)
    logger = logging.getLogger("math_verify")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    handler = signal.getsignal(signal.SIGPROF)
    yield limit
    signal.signal(signal.SIGPROF, handler)


def verdicts(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[str, str]) -> list[str]:
    answers = io.StringIO()
    asked = "".join(json.dumps([*pair, 5]) + "\n" for pair in pairs)
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    monkeypatch.setattr(sys, "stdout", answers)
    worker.main()
    assert sys.stdout is sys.stderr  # what libraries print is in no verdict
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    return answers.getvalue().splitlines()


def test_a_verdict_is_of_values_and_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, limits: Mock
) -> None:
    pairs = ("$1/2$", "0.5"), ("$1/2$", "0.6"), (r"$\frac{2}{4}$", r"$\frac12$"), ("$x$", "no")
    found = ["ready", "right", "wrong", "right", "wrong"]
    assert verdicts(monkeypatch, *pairs) == found
    limits.assert_called_once_with(resource.RLIMIT_AS, (worker.MEMORY, worker.MEMORY))


def test_what_could_not_be_compared_is_undecided_and_the_next_pair_is_asked(
    monkeypatch: pytest.MonkeyPatch, limits: Mock
) -> None:
    """Memory or time that runs out, or a comparison that math-verify itself gave up."""

    def verify(known: str, answer: str, timeout_seconds: float | None) -> bool:
        if answer == "memory":
            raise MemoryError
        if answer == "slow":
            signal.raise_signal(signal.SIGPROF)
        if answer == "given up":
            logging.getLogger("math_verify").warning("Timeout during comparison")
        return known == answer

    monkeypatch.setattr(math_verify, "parse", lambda text, parsing_timeout: text)
    monkeypatch.setattr(math_verify, "verify", verify)
    limits.side_effect = ValueError  # no such limit on this system
    answers = ("memory", "slow", "given up", "1", "2")
    found = verdicts(monkeypatch, *(("1", answer) for answer in answers))
    assert found == ["ready", "undecided", "undecided", "undecided", "right", "wrong"]
