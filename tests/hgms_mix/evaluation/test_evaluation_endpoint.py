"""Everything that the endpoint of a judge can do wrong."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects
from support.judged import (
    Act,
    Endpoint,
    Reply,
    completion,
    error,
    good,
    mark,
    rated,
    records_of,
    stage,
    write_bench,
)

from hgms_mix.evaluation.judge_calls import ratings_path

pytest.importorskip("openai", reason="the extra hgms[llm] is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bench(tmp_path, 5)


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
    ratings = {record["rating"] for record in records_of(evaluation, folder).values()}
    assert ratings == {mark(body) for body in endpoint.bodies}


def test_retry_after_holds_for_all_requests_and_a_pace_and_a_number_at_once_are_kept(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    def act(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.1)
        refused = json.dumps({"error": {"message": "slow down"}}).encode()
        return (429, {"retry-after": "1"}, refused) if number == 2 else good(number, body)

    endpoint, paced = serve(act), serve(good)
    assert rated(folder, endpoint.url, concurrency=3)["rated"] == 10
    assert (endpoint.most, len(endpoint.times)) == (3, 11)
    # the other threads may send a few until the refusal has been read; the rest of the 8 wait for
    # the second that was named
    since = endpoint.times[2]
    assert sum(since < at < since + 0.9 for at in endpoint.times) <= 4
    rated(folder, paced.url, requests_per_minute=1200)
    assert paced.times[-1] - paced.times[0] >= 9 * 0.05 - 0.03


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
            "q4|a85.1 {x}": (200, {"content-type": "text/plain"}, b"hello"),
        }
        return answers.get(text) or good(number, body)

    endpoint = serve(act)
    evaluation = stage(folder, endpoint.url, attempts=3)
    result = evaluation.rate(folder)["mt-bench"]
    records = records_of(evaluation, folder)
    assert (result["rated"], result["failed"]) == (6, 4)
    assert (records[82, 1]["rating"], records[82, 1]["attempts"]) == (6.0, 3)
    kinds = {81: "no rating in", 83: "malformed", 84: "refused: BadRequest", 85: "malformed"}
    assert all(records[key, 1]["reason"].startswith(kind) for key, kind in kinds.items())
    assert records[81, 1]["reply"] == "I would rather not say."
    # failures are neither averaged as some number nor dropped without a word
    values = [record["rating"] for record in records.values() if record["rating"] is not None]
    assert result["score"] == pytest.approx(statistics.mean(values))
    assert result["if_failed"] == pytest.approx([sum(values) / 10, (sum(values) + 40) / 10])
    # a later pass asks for those alone
    sent = len(endpoint.bodies)
    rated(folder, endpoint.url, attempts=3)
    assert len(endpoint.bodies) - sent == 4 * 3
    # another judge starts from nothing, in a file of its own, and rates what has changed
    later = serve(good)
    assert rated(folder, later.url)["failed"] == 0
    assert len(list(folder.glob("mt-bench.ratings.*"))) == 2
    path = folder / "mt-bench.answers.jsonl"
    path.write_text(path.read_text().replace("a83.2", "another"))
    rated(folder, later.url)
    assert len(later.bodies) == 11
    assert "another" in later.bodies[-1]["messages"][1]["content"]


def test_a_judge_that_stops_answering_leaves_what_was_rated(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    down = [True]

    def act(number: int, body: dict[str, Any]) -> Reply:
        return (error(503, "overloaded") if down and number >= 3 else good)(number, body)

    endpoint = serve(act)
    evaluation = stage(folder, endpoint.url, concurrency=1, retries=2)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        evaluation.rate(folder)
    assert "(tries: 3)" in caught.value.message
    assert "3 of 10 ratings" in str(caught.value.hint)
    assert (len(endpoint.bodies), len(records_of(evaluation, folder))) == (6, 3)
    path = ratings_path(evaluation.judge, folder)  # type: ignore[arg-type]
    path.write_text(path.read_text()[:-9])  # and the last line was only half written
    down.clear()
    result = evaluation.rate(folder)["mt-bench"]
    assert len(endpoint.bodies) == 6 + 8
    uninterrupted = rated(folder, serve(good).url)
    keys = ("score", "interval", "rated", "failed", "turns")
    assert [result[key] for key in keys] == [uninterrupted[key] for key in keys]


@pytest.mark.parametrize(
    ("act", "changes", "cause", "sent"),
    [
        (error(401, "bad key"), {}, "AuthenticationError", range(1, 3)),  # as many as at once
        (error(429, "pay first", "insufficient_quota"), {}, "RateLimitError", range(1, 3)),
        # of one turn, so that each is sent, but none is rated
        (
            error(400, "max_tokens is not supported"),
            {},
            "max_tokens is not supported",
            range(10, 100),
        ),
        # no single read takes longer than the timeout
        (
            lambda *_: (200, {"trickle": "yes"}, b" " * 100),
            {"timeout": 0.3, "retries": 0},
            "(tries: 1): APITimeoutError",
            range(1, 3),
        ),
    ],
    ids=["key", "quota", "request", "trickle"],
)
def test_what_waiting_cannot_mend_ends_the_pass(
    act: Act,
    changes: dict[str, Any],
    cause: str,
    sent: range,
    folder: Path,
    serve: Callable[[Act], Endpoint],
) -> None:
    endpoint = serve(act)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        rated(folder, endpoint.url, **changes)
    assert cause in caught.value.message
    assert len(endpoint.bodies) in sent


def test_replies_of_another_shape_are_malformed(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    """Half a surrogate pair is kept as a question mark."""
    shapes = [
        b"[" * 100_000,
        b'{"choices": ' + b"9" * 10_000 + b"}",
        b"[1]",
        b'{"choices": [3]}',
        b'{"choices": {"a": 1}}',
    ]
    half = completion("X [[7]]").replace(b"X", b"\\ud800")
    endpoint = serve(lambda number, _: (200, {}, shapes[number] if number < 5 else half))
    evaluation = stage(folder, endpoint.url, attempts=1, concurrency=1)
    assert evaluation.rate(folder)["mt-bench"]["failed"] == 5
    records = list(records_of(evaluation, folder).values())
    assert all(record["reason"].startswith("malformed: ") for record in records[:5])
    assert {(r["reply"], r["rating"]) for r in records[5:]} == {("? [[7]]", 7.0)}
