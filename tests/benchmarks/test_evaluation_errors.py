"""What is said wrong of benchmarks, their files, the judge and its prompts, by code and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation import Evaluate, Judge
from evaluation.judge import messages
from evaluation.questions import JudgePrompt, Question, load, place
from support.helpers import rejects
from support.judge_files import evaluation_of, read, write_bench
from support.source_files import lines

from hgms_core import ConfigError
from hgms_core.errors import CheckpointError, DataError

pytestmark = pytest.mark.extended

TALK = {"question_id": 81, "category": "math", "turns": ["q", "more"]}
KNOWN = {"question_id": 81, "choices": [{"turns": ["a", "b"]}]}


@pytest.mark.parametrize(
    ("benchmark", "text", "code", "line"),
    [
        ("gsm8k", "\n \n", "no-rows", ()),
        ("gsm8k", "\n{", "wrong-row", (2,)),
        ("gsm8k", "[1]", "wrong-row", (1,)),
        ("math", '{"problem": "p"}', "wrong-row", (1,)),
        ("gsm8k", b"\xff", "unreadable-file", ()),
        ("gsm8k", None, "unreadable-file", ()),
    ],
)
def test_a_file_without_questions_is_refused_with_its_line(
    tmp_path: Path, benchmark: Any, text: str | bytes | None, code: str, line: tuple[int, ...]
) -> None:
    path = tmp_path / "questions.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with rejects(code, str(path), *line, of=DataError):
        load(benchmark, path)


@pytest.mark.parametrize(
    ("question", "answer", "file", "line"),
    [
        ({}, {"choices": []}, "reference_answer_gpt-4", 2),
        ({}, {"question_id": []}, "reference_answer_gpt-4", 2),
        ({"question_id": "81"}, {}, "question", 2),
        ({"turns": ["a", "b", "c"]}, {}, "question", 2),
        ({}, {"choices": [{"turns": ["a"]}]}, "question", 1),
        ({"question_id": 82}, {}, "question", 2),
    ],
)
def test_conversations_and_reference_answers_have_to_fit(
    tmp_path: Path, question: dict[str, Any], answer: dict[str, Any], file: str, line: int
) -> None:
    lines(tmp_path / "question.jsonl", [TALK, {**TALK, **question}])
    lines(tmp_path / "reference_answer_gpt-4.jsonl", [KNOWN, {**KNOWN, **answer}])
    with rejects("wrong-row", str(tmp_path / f"{file}.jsonl"), line, of=DataError):
        load("mt-bench", tmp_path)


def test_without_a_path_a_benchmark_is_looked_for_below_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HGMS_DATA", raising=False)
    with rejects("missing-variable", "paths", "math", of=DataError):
        place("math", None)


def test_a_message_contains_no_value_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with rejects("missing-file", "paths", "gsm8k", "$OPENAI_API_KEY/x", of=DataError) as caught:
        place("gsm8k", "$OPENAI_API_KEY/x")
    assert "sk-secret" not in repr(caught.value.as_dict())


def test_a_prompt_of_the_judge_has_its_own_fields_only() -> None:
    """Other text in braces stays as it is, also in the question."""
    prompts = {"single-v1": JudgePrompt("S", "{question} {key} {question.turns} {answer}")}
    _, user = messages(prompts, Question(1, ("q {answer}",)), ["a"], 1)
    assert user["content"] == "q {answer} {key} {question.turns} a"


@pytest.mark.parametrize(
    "address",
    [
        "ftp://host/v1",
        "localhost:8000",
        "http://",
        "http://host:0",
        "http://host:x",
        "http://me:secret@host/v1",
    ],
)
def test_a_judge_is_at_an_address_that_holds_no_password(address: str) -> None:
    with rejects("wrong-value", "base_url", of=ConfigError) as caught:
        Judge(base_url=address)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "code", "place"),
    [
        ({"benchmarks": ("gsm9k",)}, "unknown-choice", ("benchmarks", 0)),
        ({"paths": {"maths": "x"}}, "unknown-benchmark", ("paths",)),
        ({"benchmarks": ("math", "math")}, "wrong-value", ("benchmarks",)),
    ],
)
def test_benchmarks_are_known_and_named_once(
    settings: Any, code: str, place: tuple[str | int, ...]
) -> None:
    with rejects(code, *place, of=ConfigError):
        Evaluate(**settings)


def test_ratings_need_a_judge_and_all_answers(tmp_path: Path) -> None:
    folder = write_bench(tmp_path, 2)
    with rejects("missing-option", "judge", of=ConfigError):
        evaluation_of(folder, None).rate(folder)
    path = folder / "mt-bench.answers.jsonl"
    lines(path, read(path)[:-1])
    with rejects("too-few-rows", str(folder), of=CheckpointError):
        evaluation_of(folder, Judge(base_url="http://localhost:1/v1")).rate(folder)
