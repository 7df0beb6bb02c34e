"""The judge: what it is asked, what its replies are worth, and everything an endpoint can do
wrong.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects
from support.judged import Endpoint, Reply, completion, evaluation_of, records_of, write_bench

from hgms_core import CheckpointError, ConfigError
from hgms_mix.evaluation import Evaluate, Judge, bootstrap, rating
from hgms_mix.evaluation.judge import messages
from hgms_mix.evaluation.judge_calls import ratings_path
from hgms_mix.evaluation.questions import JudgePrompt, Question, judge_prompts, load, place

pytest.importorskip("openai", reason="the extra hgms[llm] is not installed")

data = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no MT-Bench to judge"
)
Act = Callable[[int, dict[str, Any]], Reply]
COUNT = 5
NOBODY = "http://localhost:1/v1"


@pytest.fixture
def serve() -> Iterator[Callable[[Act], Endpoint]]:
    with contextlib.ExitStack() as stack:

        def start(act: Act) -> Endpoint:
            endpoint = Endpoint(act)
            stack.callback(endpoint.close)
            return endpoint

        yield start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bench(tmp_path, COUNT)


def good(number: int, body: dict[str, Any]) -> Reply:
    return 200, {}, f"Because. Rating: [[{mark(body)}]]"


def mark(body: dict[str, Any]) -> int:
    """A rating that depends on nothing but what is asked."""
    return 1 + sum(map(ord, body["messages"][1]["content"])) % 10


def error(status: int, message: str = "no", code: str | None = None) -> Act:
    body = json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()
    return lambda *_: (status, {}, body)


def stage(folder: Path, url: str, **changes: Any) -> Evaluate:
    usual = {"timeout": 5.0, "backoff": 0.01, "retries": 3, "concurrency": 2}
    judge = Judge(**{"base_url": url, "model": "test/judge", **usual, **changes})
    return evaluation_of(folder, judge)


def rated(folder: Path, url: str, **changes: Any) -> Any:
    return stage(folder, url, **changes).rate(folder)["mt-bench"]


REPLIES = {
    "Rating: [[5]]": 5.0,
    "[[8.5]] and [[2]]": 8.5,
    "Rating: [7]": 7.0,
    "see [1], so [[3]]": 3.0,
    "Rating: 9": None,
    "[[rating]]": None,
    "[[-1]]": None,
    "[[99]]": None,
    "[[10]]": 10.0,
    "": None,
}


def test_ratings_in_replies() -> None:
    assert {reply: rating(reply) for reply in REPLIES} == REPLIES


@data
def test_the_judge_is_asked_as_in_mt_bench() -> None:
    where = place("mt-bench", None)
    questions, _ = load("mt-bench", where)
    prompts = judge_prompts(where)
    assert len(questions) == 80
    assert sum(bool(question.references) for question in questions) == 30
    by_category = {question.category: question for question in questions}
    assert len(by_category) == 8
    for category, question in by_category.items():
        first, second = (
            messages(prompts, question, ["ANSWER {one}", "ANSWER {two}"][:turn], turn)
            for turn in (1, 2)
        )
        assert [message["role"] for message in first] == ["system", "user"]
        assert "[Question]\n" + question.turns[0] in first[1]["content"]
        assert "[The Start of Assistant's Answer]\nANSWER {one}\n" in first[1]["content"]
        assert "ANSWER {two}" in second[1]["content"]
        assert question.turns[1] in second[1]["content"]
        assert "focus on the assistant's answer to the second" in second[0]["content"]
        known = category in ("math", "reasoning", "coding")
        for text in (first[1]["content"], second[1]["content"]):
            assert ("Reference" in text) == known
            assert not known or question.references[0] in text
        assert not known or question.references[1] in second[1]["content"]
    assert not re.search(
        r"\{(question|answer|ref)", str(messages(prompts, questions[0], ["a", "b"], 2))
    )


def test_a_request_holds_the_judges_settings_and_the_key(
    folder: Path, serve: Callable[[Act], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-1")
    monkeypatch.setenv("HGMS_SEND_KEY", "127.0.0.1")
    endpoint = serve(good)
    evaluation = stage(folder, endpoint.url, api_key_env="MY_KEY", temperature=0.5, max_tokens=99)
    result = evaluation.rate(folder)["mt-bench"]
    assert {
        (body["path"], body["model"], body["temperature"], body["max_tokens"])
        for body in endpoint.bodies
    } == {("/v1/chat/completions", "test/judge", 0.5, 99)}
    assert {headers["authorization"] for headers in endpoint.headers} == {"Bearer sk-secret-1"}
    assert not any("sk-secret" in path.read_text() for path in folder.iterdir())
    users = {body["messages"][1]["content"] for body in endpoint.bodies}
    assert users >= {"q0|a81.1 {x}", "q0|a81.1 {x}|more 0|a81.2 {x}"}
    records = records_of(evaluation, folder)
    assert result["score"] == pytest.approx(statistics.mean(r["rating"] for r in records.values()))
    assert (result["rated"], result["failed"]) == (10, 0)
    assert (result["n"], result["new_tokens"]) == (COUNT, 30)
    assert result["if_failed"] == pytest.approx([result["score"]] * 2)
    pairs = [[records[81 + k, turn]["rating"] for turn in (1, 2)] for k in range(COUNT)]
    expected = bootstrap([statistics.mean(pair) for pair in pairs])
    assert (result["interval"]["low"], result["interval"]["high"]) == (expected.low, expected.high)
    assert (result["interval"]["resamples"], result["interval"]["seed"]) == (10_000, 0)


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
    evaluation = stage(folder, endpoint.url, timeout=0.5)
    result = evaluation.rate(folder)["mt-bench"]
    assert (result["rated"], result["failed"]) == (10, 0)
    assert len(endpoint.bodies) == 10 + len(troubles)
    ratings = {record["rating"] for record in records_of(evaluation, folder).values()}
    assert ratings == {mark(body) for body in endpoint.bodies}


def test_retry_after_holds_for_all_requests(folder: Path, serve: Callable[[Act], Endpoint]) -> None:
    refused = json.dumps({"error": {"message": "slow down"}}).encode()

    def act(number: int, body: dict[str, Any]) -> Reply:
        return (429, {"retry-after": "1"}, refused) if number == 2 else good(number, body)

    endpoint = serve(act)
    assert rated(folder, endpoint.url)["rated"] == 10
    times = endpoint.times
    assert len(times) == 11
    # the other thread may send a few until the refusal has been read; the rest of the 8 wait for
    # the second that was named
    assert sum(times[2] < at < times[2] + 0.9 for at in times) <= 3


def test_a_pace_and_a_number_at_once_are_kept(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    def slow(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.15)
        return good(number, body)

    endpoint, paced = serve(slow), serve(good)
    rated(folder, endpoint.url, concurrency=3)
    assert endpoint.most == 3
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
    assert "reason" not in records[82, 1]
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
    # another judge starts from nothing, in a file of its own
    later = serve(good)
    assert rated(folder, later.url)["failed"] == 0
    assert len(later.bodies) == 10
    assert len(list(folder.glob("mt-bench.ratings.*"))) == 2
    # and rates what has changed
    path = folder / "mt-bench.answers.jsonl"
    path.write_text(path.read_text().replace("a83.2", "another"))
    rated(folder, later.url)
    assert len(later.bodies) == 11
    assert "another" in later.bodies[-1]["messages"][1]["content"]


def test_a_judge_that_stops_answering_leaves_what_was_rated(
    folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    down = True

    def act(number: int, body: dict[str, Any]) -> Reply:
        return (error(503, "overloaded") if down and number >= 3 else good)(number, body)

    endpoint = serve(act)
    evaluation = stage(folder, endpoint.url, concurrency=1, retries=2)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        evaluation.rate(folder)
    for part in (endpoint.url, "(tries: 3)", "overloaded"):
        assert part in caught.value.message
    for part in ("timeout=5 ", "retries=2", "3 of 10 ratings"):
        assert part in str(caught.value.hint)
    assert len(endpoint.bodies) == 6
    assert len(records_of(evaluation, folder)) == 3
    path = ratings_path(evaluation.judge, folder)  # type: ignore[arg-type]
    path.write_text(path.read_text()[:-9])  # and the last line was only half written
    down = False
    result = evaluation.rate(folder)["mt-bench"]
    assert len(endpoint.bodies) == 6 + 8
    uninterrupted = rated(folder, serve(good).url)
    for key in ("score", "interval", "rated", "failed", "turns"):
        assert result[key] == uninterrupted[key]


@pytest.mark.parametrize(
    ("act", "cause", "least", "most"),
    [
        (error(401, "bad key"), "AuthenticationError", 1, 2),  # as many as are sent at once
        (error(404, "no such model"), "NotFoundError", 1, 2),
        (error(429, "pay first", "insufficient_quota"), "RateLimitError", 1, 2),
        # of one turn, so that each is sent, but none is rated
        (error(400, "max_tokens is not supported"), "max_tokens is not supported", 10, 99),
    ],
)
def test_what_waiting_cannot_mend_is_not_tried_again(
    act: Act, cause: str, least: int, most: int, folder: Path, serve: Callable[[Act], Endpoint]
) -> None:
    endpoint = serve(act)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        rated(folder, endpoint.url)
    assert cause in caught.value.message
    assert least <= len(endpoint.bodies) <= most


def test_nobody_at_the_address(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with rejects("judge-failed", "evaluate", "judge") as caught:
        rated(folder, f"http://127.0.0.1:{port}/v1")
    assert "(tries: 4): APIConnectionError" in caught.value.message


def test_no_key_no_judge_no_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with rejects("missing-variable", "evaluate", "judge", "api_key_env", of=ConfigError):
        evaluation_of(folder, Judge()).rate(folder)
    with rejects("missing-option", "evaluate", "judge", of=ConfigError):
        evaluation_of(folder, None).rate(folder)
    path = folder / "mt-bench.answers.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with rejects("too-few-rows", str(folder), of=CheckpointError):
        rated(folder, NOBODY)


def test_a_file_alone_sends_no_variable_anywhere(
    folder: Path, serve: Callable[[Act], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's key goes to OpenAI; another variable, or another host, only where the command
    says so.
    """
    monkeypatch.delenv("HGMS_SEND_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    endpoint = serve(good)
    reports: list[str] = []
    stage(folder, endpoint.url).rate(folder, reports.append)
    assert {headers["authorization"] for headers in endpoint.headers} == {"Bearer none"}
    assert any("(no key is sent)" in line for line in reports)
    sent = len(endpoint.bodies)
    other = {"api_key_env": "DATABASE_PASSWORD"}
    for judge in (
        Judge(base_url=endpoint.url, model="other", **other),
        Judge(base_url="http://api.openai.com/v1", **other),
        Judge(**other),
        Judge(base_url="http://api.openai.com/v1"),  # in the clear
    ):
        option = ("evaluate", "judge", "api_key_env")
        with rejects("not-allowed", *option, of=ConfigError) as caught:
            judge.require()
        assert f"--send-key {judge.host} " in str(caught.value.hint)
    assert len(endpoint.bodies) == sent
    assert Judge().key() == Judge(base_url="https://api.openai.com/v1").key() == "sk-mine"
    assert Judge().sends == "the key in OPENAI_API_KEY is sent to api.openai.com"
    monkeypatch.setenv("HGMS_SEND_KEY", "elsewhere.example,127.0.0.1")
    assert Judge(base_url=endpoint.url, **other).key() == "hunter2"


ADDRESSES = ("http://me:secret@localhost/v1", "localhost:8000", "file:///etc/passwd", "http://")


@pytest.mark.parametrize("url", [*ADDRESSES, "http://a:b/"])
def test_an_address_that_is_none_or_holds_a_password_is_refused(url: str) -> None:
    with rejects("wrong-value", "base_url", of=ConfigError) as caught:
        Judge(base_url=url)
    assert not any("secret" in line for line in caught.value.lines())


def test_a_reply_that_trickles_is_given_up(folder: Path) -> None:
    """A byte now and then: no single read takes longer than the timeout."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.05)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        with rejects("judge-failed", "evaluate", "judge") as caught:
            rated(folder, f"http://127.0.0.1:{server.server_port}/v1", timeout=0.3, retries=0)
        assert "(tries: 1): APITimeoutError" in caught.value.message
    finally:
        server.shutdown()
        server.server_close()


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


@pytest.mark.parametrize("line", ["{}", '{"id": 81, "turn": 1}', "[" * 100_000])
def test_a_record_of_another_shape_is_named(line: str, folder: Path) -> None:
    path = folder / "mt-bench.answers.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with rejects("wrong-row", str(path), 1, of=CheckpointError):
        rated(folder, NOBODY)


def test_nothing_is_written_through_a_symbolic_link(
    folder: Path, serve: Callable[[Act], Endpoint], tmp_path: Path
) -> None:
    evaluation = stage(folder, serve(good).url)
    assert evaluation.judge is not None
    mine = tmp_path / "mine.txt"
    mine.write_text("keep\nthis")
    ratings_path(evaluation.judge, folder).symlink_to(mine)
    with pytest.raises(CheckpointError) as caught:
        evaluation.rate(folder)
    assert caught.value.code in ("cannot-write", "wrong-row")
    assert caught.value.place[0] == str(ratings_path(evaluation.judge, folder))
    assert mine.read_text() == "keep\nthis"


@pytest.mark.parametrize(
    "template",
    [
        *("{answr}", "{question.nope}", "{question[0]}", "{question:99999999999}"),
        *("{question!r}", "{}", "{question"),
    ],
)
def test_a_template_that_wants_something_else_is_named(template: str) -> None:
    prompts = {"single-v1": JudgePrompt("", template)}
    with rejects("wrong-format", "judge_prompts.jsonl", "single-v1", of=ConfigError):
        messages(prompts, Question(1, ("q",), category="stem"), ["a"], 1)


def test_a_template_takes_braces_as_they_are() -> None:
    prompts = {"single-v1": JudgePrompt("", "{{x}} {question}|{answer}")}
    asked = messages(prompts, Question(1, ("{q}",), category="stem"), ["{a.b}"], 1)
    assert asked[1]["content"] == "{x} {q}|{a.b}"
