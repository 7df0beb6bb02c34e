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
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.helpers import rejects

from hgms_core import CheckpointError, ConfigError
from hgms_mix.evaluation import Evaluate, Judge, bootstrap, rating
from hgms_mix.evaluation.judge import messages
from hgms_mix.evaluation.judge_calls import ratings_path
from hgms_mix.evaluation.questions import Question, judge_prompts, load, place

pytest.importorskip("openai", reason="the extra hgms[llm] is not installed")

data = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no MT-Bench to judge"
)

Reply = tuple[int, dict[str, str], str | bytes | None]
"""Status, headers, and a judge's text, or a body as it is, or None for no answer at all."""


class Endpoint:
    """An OpenAI-compatible server that does what ``act`` says: given the number of the request
    and its body.
    """

    def __init__(self, act: Callable[[int, dict[str, Any]], Reply]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most = self._now = 0
        self._over = threading.Event()
        endpoint = self
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(endpoint.bodies)
                    endpoint.bodies.append({"path": self.path, **body})
                    endpoint.headers.append(
                        {key.lower(): value for key, value in self.headers.items()}
                    )
                    endpoint.times.append(time.monotonic())
                    endpoint._now += 1
                    endpoint.most = max(endpoint.most, endpoint._now)
                try:
                    status, headers, text = act(number, body)
                    if text is None:
                        endpoint._over.wait(30)
                        self.close_connection = True
                        return
                    sent = text if isinstance(text, bytes) else completion(text)
                    self.send_response(status)
                    for key, value in {
                        "content-type": "application/json",
                        "content-length": str(len(sent)),
                        **headers,
                    }.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(sent)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with lock:
                        endpoint._now -= 1

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def close(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def completion(text: str) -> bytes:
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[int, dict[str, Any]], Reply]], Endpoint]]:
    with contextlib.ExitStack() as stack:

        def start(act: Callable[[int, dict[str, Any]], Reply]) -> Endpoint:
            endpoint = Endpoint(act)
            stack.callback(endpoint.close)
            return endpoint

        yield start


def good(number: int, body: dict[str, Any]) -> Reply:
    return 200, {}, f"Because. Rating: [[{mark(body)}]]"


def mark(body: dict[str, Any]) -> int:
    """A rating that depends on nothing but what is asked."""
    return 1 + sum(map(ord, body["messages"][1]["content"])) % 10


def error(status: int, message: str = "no", code: str | None = None) -> Callable[..., Reply]:
    body = json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()
    return lambda *_: (status, {}, body)


COUNT = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Answers to five questions, of a benchmark that lies in bench/."""
    bench = tmp_path / "bench"
    out = tmp_path / "out"
    bench.mkdir()
    out.mkdir()
    rows = [
        {"question_id": 81 + k, "category": "writing", "turns": [f"q{k}", f"more {k}"]}
        for k in range(COUNT)
    ]
    kinds = {
        "single-v1": "{question}|{answer}",
        "single-v1-multi-turn": "{question_1}|{answer_1}|{question_2}|{answer_2}",
    }
    kinds |= {"single-math-v1": "-", "single-math-v1-multi-turn": "-"}
    write(bench / "question.jsonl", rows)
    write(bench / "reference_answer_gpt-4.jsonl", [])
    write(
        bench / "judge_prompts.jsonl",
        [{"name": k, "system_prompt": "S", "prompt_template": t} for k, t in kinds.items()],
    )
    write(
        out / "mt-bench.answers.jsonl",
        [answer(81 + k, turn) for k in range(COUNT) for turn in (1, 2)],
    )
    return out


def answer(key: int, turn: int) -> dict[str, Any]:
    return {
        "id": key,
        "turn": turn,
        "text": f"a{key}.{turn} {{x}}",
        "new_tokens": 3,
        "finished": True,
        "prompt_tokens": 5,
        "truncated": False,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def stage(folder: Path, url: str, **changes: Any) -> Evaluate:
    judge = Judge(
        **{
            "base_url": url,
            "model": "test/judge",
            "timeout": 5.0,
            "backoff": 0.01,
            "retries": 3,
            "concurrency": 2,
        }
        | changes
    )
    return Evaluate(
        benchmarks=("mt-bench",), paths={"mt-bench": str(folder.parent / "bench")}, judge=judge
    )


def kept(evaluation: Evaluate, folder: Path) -> list[dict[str, Any]]:
    assert evaluation.judge is not None
    return [
        json.loads(line) for line in ratings_path(evaluation.judge, folder).read_text().splitlines()
    ]


# --- what is asked, and what a reply is worth
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Rating: [[5]]", 5.0),
        ("[[8.5]] and [[2]]", 8.5),
        ("Rating: [7]", 7.0),
        ("see [1], so [[3]]", 3.0),
        ("Rating: 9", None),
        ("[[rating]]", None),
        ("[[-1]]", None),
        ("[[99]]", None),
        ("[[10]]", 10.0),
        ("", None),
    ],
)
def test_ratings_in_replies(reply: str, value: float | None) -> None:
    assert rating(reply) == value


@data
def test_the_judge_is_asked_as_in_mt_bench() -> None:
    where = place("mt-bench", None)
    questions, _ = load("mt-bench", where)
    prompts = judge_prompts(where)
    assert len(questions) == 80
    assert sum(bool(question.references) for question in questions) == 30
    by_category = {question.category: question for question in questions}
    assert set(by_category) == {
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    }
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
    folder: Path, serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
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
    assert "q0|a81.1 {x}" in users
    assert "q0|a81.1 {x}|more 0|a81.2 {x}" in users
    values = [record["rating"] for record in kept(evaluation, folder)]
    assert result["score"] == pytest.approx(statistics.mean(values))
    assert (result["rated"], result["failed"], result["n"], result["new_tokens"]) == (
        10,
        0,
        COUNT,
        30,
    )
    assert result["if_failed"] == pytest.approx([result["score"]] * 2)
    means = [
        statistics.mean(r["rating"] for r in kept(evaluation, folder) if r["id"] == 81 + k)
        for k in range(COUNT)
    ]
    expected = bootstrap(means)
    assert (result["interval"]["low"], result["interval"]["high"]) == (expected.low, expected.high)
    assert (result["interval"]["resamples"], result["interval"]["seed"]) == (10_000, 0)


# --- what an endpoint can do wrong
# --------------------------------------------------------------------------------------------------


def test_timeouts_and_server_errors_are_sent_again(
    folder: Path, serve: Callable[..., Endpoint]
) -> None:
    troubles: dict[int, Callable[..., Reply]] = {
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
    assert {record["rating"] for record in kept(evaluation, folder)} == {
        mark(body) for body in endpoint.bodies
    }


def test_retry_after_holds_for_all_requests(folder: Path, serve: Callable[..., Endpoint]) -> None:
    refused = json.dumps({"error": {"message": "slow down"}}).encode()

    def act(number: int, body: dict[str, Any]) -> Reply:
        return (429, {"retry-after": "1"}, refused) if number == 2 else good(number, body)

    endpoint = serve(act)
    assert stage(folder, endpoint.url).rate(folder)["mt-bench"]["rated"] == 10
    times = endpoint.times
    assert len(times) == 11
    # the other thread may send a few until the refusal has been read; the rest of the 8 wait for
    # the second that was named
    assert sum(times[2] < at < times[2] + 0.9 for at in times) <= 3


def test_a_pace_and_a_number_at_once_are_kept(folder: Path, serve: Callable[..., Endpoint]) -> None:
    def slow(number: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.15)
        return good(number, body)

    endpoint = serve(slow)
    stage(folder, endpoint.url, concurrency=3).rate(folder)
    assert endpoint.most == 3
    paced = serve(good)
    stage(folder, paced.url, requests_per_minute=1200).rate(folder)
    assert paced.times[-1] - paced.times[0] >= 9 * 0.05 - 0.03


def test_malformed_replies_are_asked_for_again_then_counted(
    folder: Path, serve: Callable[..., Endpoint]
) -> None:
    def act(number: int, body: dict[str, Any]) -> Reply:
        text = body["messages"][1]["content"]
        if text == "q0|a81.1 {x}":  # never a rating
            return 200, {}, "I would rather not say."
        if text == "q1|a82.1 {x}":  # one at the third attempt
            tried = sum(other["messages"] == body["messages"] for other in endpoint.bodies)
            return 200, {}, ["", b"{not json", "[[6]]"][tried - 1]
        if text == "q2|a83.1 {x}":
            return 200, {}, b'{"choices": []}'
        if text == "q3|a84.1 {x}":
            return error(400, "content filter")()
        if text == "q4|a85.1 {x}":
            return 200, {"content-type": "text/plain"}, b"hello"
        return good(number, body)

    endpoint = serve(act)
    evaluation = stage(folder, endpoint.url, attempts=3)
    result = evaluation.rate(folder)["mt-bench"]
    records = {(record["id"], record["turn"]): record for record in kept(evaluation, folder)}
    assert (result["rated"], result["failed"]) == (6, 4)
    assert records[82, 1]["rating"] == 6.0
    assert records[82, 1]["attempts"] == 3
    assert "reason" not in records[82, 1]
    reasons = {key: records[key, 1]["reason"] for key in (81, 83, 84, 85)}
    assert reasons[81] == "no rating in the reply"
    assert reasons[83].startswith("malformed")
    assert reasons[84].startswith("refused: BadRequestError")
    assert reasons[85].startswith("malformed")
    assert records[81, 1]["reply"] == "I would rather not say."
    # failures are neither averaged as some number nor dropped without a word
    values = [record["rating"] for record in records.values() if record["rating"] is not None]
    assert result["score"] == pytest.approx(statistics.mean(values))
    assert result["if_failed"] == pytest.approx([sum(values) / 10, (sum(values) + 40) / 10])
    # a later pass asks for those alone
    later = serve(good)
    again = stage(folder, endpoint.url, attempts=3)
    sent = len(endpoint.bodies)
    again.rate(folder)
    assert len(endpoint.bodies) - sent == 4 * 3
    # another judge starts from nothing, in a file of its own
    assert stage(folder, later.url).rate(folder)["mt-bench"]["failed"] == 0
    assert len(later.bodies) == 10
    assert len(list(folder.glob("mt-bench.ratings.*"))) == 2


def test_a_judge_that_stops_answering_leaves_what_was_rated(
    folder: Path, serve: Callable[..., Endpoint]
) -> None:
    down = True
    endpoint = serve(
        lambda number, body: (
            error(503, "overloaded")() if down and number >= 3 else good(number, body)
        )
    )
    evaluation = stage(folder, endpoint.url, concurrency=1, retries=2)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        evaluation.rate(folder)
    assert re.fullmatch(
        rf"the judge test/judge at {endpoint.url} does not respond \(tries: 3\): "
        r"InternalServerError: .*overloaded.* \(evaluate\.judge\)\n"
        r"  check base_url, or increase timeout=5 \(seconds\) or retries=2\n"
        r"  repeat the command to continue: 3 of 10 ratings are saved in "
        r".*mt-bench\.ratings\.test-judge-\w{6}\.jsonl",
        str(caught.value),
    )
    assert len(endpoint.bodies) == 6
    assert len(kept(evaluation, folder)) == 3
    path = ratings_path(evaluation.judge, folder)  # type: ignore[arg-type]
    path.write_text(path.read_text()[:-9])  # and the last line was only half written
    down = False
    result = evaluation.rate(folder)
    assert len(endpoint.bodies) == 6 + 8
    other = serve(good)
    uninterrupted = stage(folder, other.url).rate(folder)
    for key in ("score", "interval", "rated", "failed", "turns"):
        assert result["mt-bench"][key] == uninterrupted["mt-bench"][key]


@pytest.mark.parametrize(
    ("act", "kind", "cause"),
    [
        (error(401, "bad key"), "AuthenticationError", "bad key"),
        (error(404, "no such model"), "NotFoundError", "no such model"),
        (error(429, "pay first", "insufficient_quota"), "RateLimitError", "pay first"),
    ],
)
def test_what_waiting_cannot_mend_is_not_tried_again(
    act: Callable[..., Reply], kind: str, cause: str, folder: Path, serve: Callable[..., Endpoint]
) -> None:
    endpoint = serve(act)
    with rejects("judge-failed", "evaluate", "judge") as caught:
        stage(folder, endpoint.url).rate(folder)
    assert kind in caught.value.message
    assert cause in caught.value.message
    assert len(endpoint.bodies) <= 2  # as many as are sent at once


def test_nobody_at_the_address(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with rejects("judge-failed", "evaluate", "judge") as caught:
        stage(folder, f"http://127.0.0.1:{port}/v1").rate(folder)
    assert "(tries: 4): APIConnectionError" in caught.value.message
    assert "0 of 10 ratings" in str(caught.value.hint)


def test_a_judge_without_a_single_rating_is_an_error(
    folder: Path, serve: Callable[..., Endpoint]
) -> None:
    endpoint = serve(error(400, "max_tokens is not supported"))
    with rejects("judge-failed", "evaluate", "judge") as caught:
        stage(folder, endpoint.url).rate(folder)
    assert "max_tokens is not supported" in caught.value.message
    assert len(endpoint.bodies) >= 10  # each turn was sent


def test_no_key_no_judge_no_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    bench = {"mt-bench": str(folder.parent / "bench")}
    with rejects("missing-variable", "evaluate", "judge", "api_key_env", of=ConfigError) as caught:
        Evaluate(benchmarks=("mt-bench",), paths=bench).rate(folder)
    assert "OPENAI_API_KEY" in caught.value.message
    with rejects("missing-option", "evaluate", "judge", of=ConfigError):
        Evaluate(benchmarks=("mt-bench",), paths=bench, judge=None).rate(folder)
    path = folder / "mt-bench.answers.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with rejects("too-few-rows", str(folder), of=CheckpointError) as caught:
        stage(folder, "http://localhost:1/v1").rate(folder)
    assert caught.value.message.startswith("1 of 10 ")


def test_a_file_alone_sends_no_variable_anywhere(
    folder: Path, serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch
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
    assert any("rates 10 of 10 turns (no key is sent)" in line for line in reports)
    sent = len(endpoint.bodies)
    option = ("evaluate", "judge", "api_key_env")
    for judge in (
        Judge(base_url=endpoint.url, model="other", api_key_env="DATABASE_PASSWORD"),
        Judge(base_url="http://api.openai.com/v1", api_key_env="DATABASE_PASSWORD"),
        Judge(api_key_env="DATABASE_PASSWORD"),
    ):
        with rejects("not-allowed", *option, of=ConfigError) as caught:
            judge.require()
        assert "'DATABASE_PASSWORD'" in caught.value.message
        assert f"--send-key {judge.host} " in str(caught.value.hint)
    with rejects("not-allowed", *option, of=ConfigError) as caught:
        Judge(base_url="http://api.openai.com/v1").require()  # in the clear
    assert "--send-key api.openai.com " in str(caught.value.hint)
    assert len(endpoint.bodies) == sent
    assert (Judge().key(), Judge(base_url="https://api.openai.com/v1").key()) == (
        "sk-mine",
        "sk-mine",
    )
    assert Judge().sends == "the key in OPENAI_API_KEY is sent to api.openai.com"
    monkeypatch.setenv("HGMS_SEND_KEY", "elsewhere.example,127.0.0.1")
    assert Judge(base_url=endpoint.url, api_key_env="DATABASE_PASSWORD").key() == "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@localhost/v1",
        "localhost:8000",
        "file:///etc/passwd",
        "http://",
        "http://a:b/",
    ],
)
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
            stage(folder, f"http://127.0.0.1:{server.server_port}/v1", timeout=0.3, retries=0).rate(
                folder
            )
        assert "(tries: 1): APITimeoutError" in caught.value.message
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"choices": ' + b"9" * 10_000 + b"}",
        b"[1]",
        b'{"choices": [3]}',
        b'{"choices": {"a": 1}}',
    ],
    ids=["nested", "huge", "list", "number", "table"],
)
def test_replies_of_another_shape_are_malformed(
    body: bytes, folder: Path, serve: Callable[..., Endpoint]
) -> None:
    endpoint = serve(lambda number, _: (200, {}, body) if number == 0 else good(number, _))
    evaluation = stage(folder, endpoint.url, attempts=1, concurrency=1)
    assert evaluation.rate(folder)["mt-bench"]["failed"] == 1
    [record] = [record for record in kept(evaluation, folder) if record["rating"] is None]
    assert record["reason"].startswith("malformed: ")


def test_half_a_surrogate_pair_in_a_reply_is_kept_as_a_question_mark(
    folder: Path, serve: Callable[..., Endpoint]
) -> None:
    endpoint = serve(lambda *_: (200, {}, completion("X [[7]]").replace(b"X", b"\\ud800")))
    evaluation = stage(folder, endpoint.url)
    evaluation.rate(folder)
    assert {(record["reply"], record["rating"]) for record in kept(evaluation, folder)} == {
        ("? [[7]]", 7.0)
    }


@pytest.mark.parametrize("line", ["{}", '{"id": 81, "turn": 1}', "[" * 100_000])
def test_a_record_of_another_shape_is_named(line: str, folder: Path) -> None:
    path = folder / "mt-bench.answers.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with rejects("wrong-row", str(path), 1, of=CheckpointError):
        stage(folder, "http://localhost:1/v1").rate(folder)


def test_nothing_is_written_through_a_symbolic_link(
    folder: Path, serve: Callable[..., Endpoint], tmp_path: Path
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


def test_a_changed_answer_is_rated_again(folder: Path, serve: Callable[..., Endpoint]) -> None:
    endpoint = serve(good)
    evaluation = stage(folder, endpoint.url)
    evaluation.rate(folder)
    path = folder / "mt-bench.answers.jsonl"
    path.write_text(path.read_text().replace("a83.2", "another"))
    evaluation.rate(folder)
    assert len(endpoint.bodies) == 11
    assert "another" in endpoint.bodies[-1]["messages"][1]["content"]


def test_a_template_that_wants_something_else_is_named() -> None:
    for template, part in {
        "{answr}": "{answr}",
        "{question.nope}": "{question.nope}",
        "{question[0]}": "{question[0]}",
        "{question:99999999999}": "{question:…}",
        "{question!r}": "{question}",
        "{}": "{}",
        "{question": "expected '}'",
    }.items():
        prompts = {"single-v1": attrs.evolve(judge_prompt(), template=template)}
        file = "judge_prompts.jsonl"
        with rejects("wrong-format", file, "single-v1", of=ConfigError) as caught:
            messages(prompts, Question(1, ("q",), category="stem"), ["a"], 1)
        assert part in caught.value.message
    prompts = {"single-v1": attrs.evolve(judge_prompt(), template="{{x}} {question}|{answer}")}
    assert (
        messages(prompts, Question(1, ("{q}",), category="stem"), ["{a.b}"], 1)[1]["content"]
        == "{x} {q}|{a.b}"
    )


def judge_prompt() -> Any:
    from hgms_mix.evaluation.questions import JudgePrompt

    return JudgePrompt("", "")


# --- a real server
# --------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_real_server_with_a_small_model(
    folder: Path, tmp_path: Path, serve: Callable[..., Endpoint]
) -> None:
    """``transformers serve`` with a model trained here to say ``[[7]]``, once as it is and once
    behind a proxy that loses, turns away and garbles."""
    pytest.importorskip("fastapi", reason="transformers serve needs fastapi and uvicorn")
    pytest.importorskip("uvicorn", reason="transformers serve needs fastapi and uvicorn")
    saved = tmp_path / "judge"
    says_seven(saved)
    with served(saved) as url:
        evaluation = stage(folder, url, model=str(saved), timeout=60.0, max_tokens=12)
        result = evaluation.rate(folder)["mt-bench"]
        assert (result["score"], result["rated"], result["failed"]) == (7.0, 10, 0)
        assert {record["reply"] for record in kept(evaluation, folder)} == {"[[7]]"}

        def proxy(number: int, body: dict[str, Any]) -> Reply:
            troubles: dict[int, Reply] = {
                1: (429, {"retry-after": "0.2"}, b'{"error": {"message": "slow down"}}'),
                3: (200, {}, None),
                5: (200, {}, b'{"choices": [{"mess'),
            }
            if number in troubles:
                return troubles[number]
            request = urllib.request.Request(
                url + "/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as reply:
                return 200, {}, bytes(reply.read())

        behind = serve(proxy)
        evaluation = stage(folder, behind.url, model=str(saved), timeout=4.0, max_tokens=12)
        result = evaluation.rate(folder)["mt-bench"]
        assert (result["score"], result["rated"], result["failed"]) == (7.0, 10, 0)
        assert len(behind.bodies) == 13


def says_seven(folder: Path) -> None:
    """A two-layer Llama that answers whatever it is asked with ``[[7]]``."""
    import torch
    import transformers

    from hgms_mix.lm import BaseModel

    tokenizer = BaseModel(config={"model_type": "llama"}, tokenizer="bytes").load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}>"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = transformers.LlamaForCausalLM(settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        reply = [*tokenizer("[[7]]")["input_ids"], tokenizer.eos_token_id]
        for _ in range(400):
            prompt = torch.randint(32, 127, (16, int(torch.randint(4, 60, ()))))
            prompt[:, -1] = ord(">")
            tokens = torch.cat([prompt, torch.tensor(reply).expand(16, -1)], 1)
            labels = tokens.clone()
            labels[:, : prompt.shape[1]] = -100
            loss = model(input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("transformers")),
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder.parent / "serve.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command, "--device", "cpu"], stdout=file, stderr=file, env=environment
        ) as process,
    ):
        try:
            until = time.monotonic() + 180
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
