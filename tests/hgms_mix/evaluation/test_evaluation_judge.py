"""The judge: what it is asked, what its replies are worth, and where keys are sent."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import rejects
from support.judged import Act, Endpoint, evaluation_of, good, rated, records_of, stage, write_bench

from hgms_core import CheckpointError, ConfigError
from hgms_mix.evaluation import Judge, bootstrap, rating
from hgms_mix.evaluation.judge import messages
from hgms_mix.evaluation.judge_calls import ratings_path
from hgms_mix.evaluation.questions import JudgePrompt, Question, judge_prompts, load, place

pytest.importorskip("openai", reason="the extra hgms[llm] is not installed")

data = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no MT-Bench to judge"
)
COUNT = 5
NOBODY = "http://localhost:1/v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bench(tmp_path, COUNT)


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
