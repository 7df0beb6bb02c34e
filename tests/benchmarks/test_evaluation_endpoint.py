"""Everything that the endpoint of a judge can do wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluation.judge_calls import ratings_path
from support.helpers import rejects
from support.judge_files import (
    Act,
    Endpoint,
    Reply,
    error,
    good,
    mark,
    rated,
    records_of,
    stage,
    write_bench,
)

pytest.importorskip("openai", reason="the extra hgms[scores] is not installed")

pytestmark = pytest.mark.extended


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bench(tmp_path, 5)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of OpenAI waits half a second before the first retry."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def test_timeouts_and_server_errors_are_sent_again(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    troubles: dict[int, Act] = {
        0: lambda *_: (200, {}, None),
        2: error(500),
        3: error(503),
        4: lambda *_: (502, {"content-type": "text/html"}, b"<html>bad gateway</html>"),
        6: error(408),
    }
    endpoint = serve(lambda number, body: troubles.get(number, good)(number, body))
    evaluation = stage(folder, endpoint.url, timeout=1.0)
    result = evaluation.rate(folder)["mt-bench"]
    assert (result["rated"], result["failed"]) == (10, 0)
    assert len(endpoint.bodies) == 10 + len(troubles)
    records = records_of(evaluation, folder).values()
    assert {record["rating"] for record in records} == {mark(body) for body in endpoint.bodies}


def test_malformed_replies_are_asked_for_again_then_counted(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    def act(number: int, body: dict[str, Any]) -> Reply:
        text = body["messages"][1]["content"]
        tried = sum(other["messages"] == body["messages"] for other in endpoint.bodies)
        answers: dict[str, Any] = {
            "q0|a81.1 {x}": (200, {}, "I would rather not say."),
            "q1|a82.1 {x}": (200, {}, ["", b"{not json", "[[6]]"][tried % 4 - 1]),
            "q2|a83.1 {x}": (200, {}, b'{"choices": []}'),
            "q3|a84.1 {x}": error(400, "content filter")(number, body),
        }
        return answers.get(text) or good(number, body)

    endpoint = serve(act)
    evaluation = stage(folder, endpoint.url, attempts=3)
    result = evaluation.rate(folder)["mt-bench"]
    records = records_of(evaluation, folder)
    assert (result["rated"], result["failed"]) == (7, 3)
    assert (records[82, 1]["rating"], records[82, 1]["attempts"]) == (6.0, 3)
    kinds = {81: "no rating in", 83: "malformed", 84: "rejected: BadRequest"}
    assert all(records[key, 1]["reason"].startswith(kind) for key, kind in kinds.items())
    # failures are neither averaged as some number nor dropped without a word
    values = [record["rating"] for record in records.values() if record["rating"] is not None]
    assert result["score"] == pytest.approx(statistics.mean(values))
    assert result["if_failed"] == pytest.approx([sum(values) / 10, (sum(values) + 30) / 10])


def test_a_judge_that_stops_answering_leaves_what_was_rated(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    down = [True]

    def act(number: int, body: dict[str, Any]) -> Reply:
        return (error(503, "overloaded") if down and number >= 3 else good)(number, body)

    endpoint = serve(act)
    evaluation = stage(folder, endpoint.url, concurrency=1, retries=2)
    with rejects("judge-failed", "judge"):
        evaluation.rate(folder)
    assert (len(endpoint.bodies), len(records_of(evaluation, folder))) == (6, 3)
    path = ratings_path(evaluation.judge, folder)  # type: ignore[arg-type]
    path.write_text(path.read_text()[:-9])  # and the last line was only half written
    down.clear()
    result = evaluation.rate(folder)["mt-bench"]
    uninterrupted = rated(folder, serve(good).url)
    assert result["interval"] == uninterrupted["interval"]


@pytest.mark.parametrize(
    ("act", "cause", "sent"),
    [
        (error(401, "bad key"), "AuthenticationError", range(1, 3)),  # as many as at once
        (error(429, "pay first", "insufficient_quota"), "RateLimitError", range(4, 9)),
        # of one turn, so that each is sent, but none is rated
        (error(400, "max_tokens is not supported"), "max_tokens is not supported", range(10, 100)),
    ],
    ids=["key", "quota", "request"],
)
def test_what_waiting_cannot_mend_ends_the_pass(
    act: Act, cause: str, sent: range, folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    endpoint = serve(act)
    with rejects("judge-failed", "judge") as caught:
        rated(folder, endpoint.url)
    assert cause in caught.value.message
    assert len(endpoint.bodies) in sent


def test_a_finished_rating_is_not_asked_for_again_and_a_rate_limit_is_waited_for(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    """The server's own time counts, and times that are none are left to the doubling."""
    limited = {
        number: lambda *_, named=named: (429, {"retry-after": named}, b"{}")
        for number, named in ((0, "0.2"), (3, "-5"), (5, "soon"))
    }
    endpoint = serve(lambda number, body: limited.get(number, good)(number, body))
    began = time.monotonic()
    first = rated(folder, endpoint.url, concurrency=1)
    assert time.monotonic() - began >= 0.2
    assert (first["rated"], len(endpoint.bodies)) == (10, 10 + len(limited))
    assert rated(folder, endpoint.url) == first
    assert len(endpoint.bodies) == 10 + len(limited)
