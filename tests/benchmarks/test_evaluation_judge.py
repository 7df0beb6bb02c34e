"""The judge: what it is asked, what its replies are worth, and where keys are sent."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluation import Judge, bootstrap, rating
from evaluation.judge import messages
from evaluation.questions import judge_prompts, load, place
from support.helpers import rejects
from support.judge_files import (
    Act,
    Endpoint,
    evaluation_of,
    good,
    rated,
    records_of,
    stage,
    write_bench,
)

from hgms_core import ConfigError
from hgms_core.errors import CheckpointError

pytest.importorskip("openai", reason="the extra hgms[scores] is not installed")

pytestmark = pytest.mark.extended

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
    by_category = {question.category: question for question in questions}
    assert (len(questions), len(by_category)) == (80, 8)
    for category, question in by_category.items():
        first, second = (
            messages(prompts, question, ["ANSWER {one}", "ANSWER {two}"][:turn], turn)
            for turn in (1, 2)
        )
        assert "focus on the assistant's answer to the second" in second[0]["content"]
        asked, again = first[1]["content"], second[1]["content"]
        assert "[Question]\n" + question.turns[0] in asked
        assert {"ANSWER {two}" in again, question.turns[1] in again} == {True}
        known = category in ("math", "reasoning", "coding")
        assert ["Reference" in text for text in (asked, again)] == [known, known]
        assert not known or all(reference in again for reference in question.references)
        assert not re.search(r"\{(question|answer|ref)", asked + again)


def test_a_request_holds_the_judges_settings_and_the_key(
    folder: Path, serve: Callable[[Act], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-1")
    endpoint = serve(good)
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    evaluation = stage(folder, None, temperature=0.5, max_tokens=99)
    result = evaluation.rate(folder)["mt-bench"]
    fields = ("path", "model", "temperature", "max_tokens")
    assert {tuple(body[name] for name in fields) for body in endpoint.bodies} == {
        ("/v1/chat/completions", "test/judge", 0.5, 99)
    }
    assert {headers["authorization"] for headers in endpoint.headers} == {"Bearer sk-secret-1"}
    assert not any("sk-secret" in path.read_text() for path in folder.iterdir())
    records = records_of(evaluation, folder)
    pairs = [[records[81 + k, turn]["rating"] for turn in (1, 2)] for k in range(COUNT)]
    expected = bootstrap([statistics.mean(pair) for pair in pairs])
    assert (result["interval"]["low"], result["interval"]["high"]) == expected


def test_without_a_key_or_with_answers_that_are_none_nobody_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with rejects("missing-variable", "judge", of=ConfigError):
        evaluation_of(folder, Judge()).rate(folder)
    path = folder / "mt-bench.answers.jsonl"
    path.write_text("{}\n" + path.read_text())
    with rejects("wrong-row", str(path), 1, of=CheckpointError):
        rated(folder, NOBODY)


def test_a_file_alone_sends_no_key_anywhere(
    folder: Path, serve: Callable[[Act], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key goes to the endpoint of the environment, which holds no password."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    endpoint = serve(good)
    stage(folder, endpoint.url).rate(folder)
    assert {headers["authorization"] for headers in endpoint.headers} == {"Bearer none"}
    assert Judge(base_url="https://api.openai.com/v1").key() == "none"
    assert Judge().key() == "sk-mine"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://me:secret@host/v1")
    with rejects("wrong-value", "judge", "base_url", of=ConfigError) as caught:
        Judge().require()
    assert "secret" not in str(caught.value)
