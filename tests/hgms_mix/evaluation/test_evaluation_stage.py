"""The stage `evaluate`: it goes on where it stopped, and its folder knows what made it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.generating import by_hand, small_model
from support.helpers import rejects
from support.judged import read, sums, write_bench
from support.source_files import lines

from hgms.config.convert import converter_for
from hgms_core import CheckpointError, ConfigError, DataError
from hgms_core.registry import Registry
from hgms_mix.evaluation import Evaluate, Judge

pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """Nine sums as GSM8K, four problems as MATH, two conversations as MT-Bench."""
    folder = tmp_path_factory.mktemp("bench")
    write_bench(folder, 2)
    sums(folder / "gsm8k.jsonl", 9)
    problems = [
        {"problem": f"Solve {k}x = 1", "solution": rf"So $\boxed{{\frac{{1}}{{{k}}}}}$."}
        for k in range(2, 6)
    ]
    lines(folder / "math.jsonl", problems)
    paths = {name: str(folder / f"{name}.jsonl") for name in ("gsm8k", "math")}
    return Evaluate(
        benchmarks=("gsm8k", "math", "mt-bench"),
        paths={**paths, "mt-bench": str(folder / "bench")},
        template="plain",
        max_new_tokens=8,
        batch_size=3,
        judge=None,
    )


@pytest.fixture(scope="module")
def answered(
    bench: Evaluate, llama: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a finished evaluation."""
    folder = tmp_path_factory.mktemp("answered") / "out"
    bench.run(*llama, folder)
    return folder


@pytest.fixture
def out(answered: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(answered, tmp_path / "out"))


def test_a_run_asks_the_question_and_the_instruction_scores_and_counts(
    bench: Evaluate, answered: Path, llama: tuple[Any, Any]
) -> None:
    results = json.loads((answered / "results.json").read_text())
    gsm8k, math, talks = (results[name] for name in bench.benchmarks)
    assert (gsm8k["n"], gsm8k["paper_n"], math["n"], math["paper_n"]) == (9, 1319, 4, 4989)
    assert gsm8k["score"] == gsm8k["interval"]["low"] == 0.0 < gsm8k["interval"]["high"]
    assert (gsm8k["answers_unfinished"], gsm8k["new_tokens"]) == (9, 72)
    assert (talks["score"], talks["rated"], talks["failed"]) == (None, 0, 4)
    answers = read(answered / "gsm8k.answers.jsonl")
    lengths = [record["prompt_tokens"] for record in answers]
    assert lengths == sorted(lengths, reverse=True)
    assert [record["id"] for record in read(answered / "gsm8k.scores.jsonl")] == list(range(9))

    model, tokenizer = llama

    def said(tokens: list[int]) -> str:
        return tokenizer.decode(by_hand(model, tokens, 8), skip_special_tokens=True).strip()

    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    asked = tokenizer(f"What is 0 + 1?\n{instruction}\n")["input_ids"]
    assert {row["id"]: row["text"] for row in answers}[0] == said(asked)
    # the second turn of a conversation follows the model's own first answer, which ends as in
    # training
    turns = {(r["id"], r["turn"]): r for r in read(answered / "mt-bench.answers.jsonl")}
    first, second = (
        tokenizer(text)["input_ids"] for text in ("q0\n" + turns[81, 1]["text"], "more 0\n")
    )
    talk = [*first, 257, *second]
    assert (turns[81, 2]["prompt_tokens"], turns[81, 2]["text"]) == (len(talk), said(talk))


def test_right_answers_are_found_right(
    bench: Evaluate,
    llama: tuple[Any, Any],
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model's answers replaced by right ones, a wrong one and none. New results take the place
    of the old ones, which a write that fails leaves as they were.
    """
    texts = {k: rf"Thus \boxed{{{2 * k + 1}}} in all" for k in range(9)}
    texts |= {3: "I give up", 4: r"It is \boxed{900}"}
    path = out / "gsm8k.answers.jsonl"
    lines(path, [{**row, "text": texts[row["id"]]} for row in read(path)])
    monkeypatch.setattr(llama[0], "generate", None)  # nothing is asked again
    old = tmp_path / "old.json"
    os.link(out / "results.json", old)
    result = bench.run(*llama, out)["gsm8k"]
    assert (result["correct"], result["no_answer"]) == (7, 1)
    assert result["score"] == pytest.approx(100 * 7 / 9)
    assert json.loads(old.read_text())["gsm8k"]["score"] == 0.0


def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    bench: Evaluate,
    llama: tuple[Any, Any],
    answered: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(text: str) -> None:
        if text == "math: 3 of 4 answered":
            raise KeyboardInterrupt

    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        bench.run(*llama, folder, interrupt)
    path = folder / "math.answers.jsonl"
    assert len(read(path)) == 3
    path.write_text(path.read_text()[:-20])  # the last line was half written
    rows = []

    def counted(generate: Any = llama[0].generate, **inputs: Any) -> Any:
        rows.append(len(inputs["input_ids"]))
        return generate(**inputs)

    monkeypatch.setattr(llama[0], "generate", counted)
    bench.run(*llama, folder)
    assert rows == [2, 2, 2]  # two problems of MATH, two conversations of two turns
    ours, theirs = (
        {file.name: sorted(file.read_text().splitlines()) for file in place.glob("*.jsonl")}
        for place in (folder, answered)
    )
    assert ours == theirs
    assert (folder / "results.json").read_bytes() == (answered / "results.json").read_bytes()


def test_a_judge_that_cannot_be_reached_costs_no_answers_and_a_missing_key_is_said_at_once(
    bench: Evaluate, llama: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    talks = attrs.evolve(bench, benchmarks=("mt-bench",), judge=Judge())
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with rejects("missing-variable", "evaluate", "judge", "api_key_env", of=ConfigError):
        talks.run(*llama, folder)
    assert not folder.exists()
    judge = Judge(base_url="http://127.0.0.1:9/v1", retries=1, backoff=0.0, timeout=1.0)
    with rejects("judge-failed", "evaluate", "judge"):
        attrs.evolve(talks, judge=judge).run(*llama, folder)
    assert json.loads((folder / "results.json").read_text())["mt-bench"]["score"] is None
    assert len(read(folder / "mt-bench.answers.jsonl")) == 4


def test_answers_made_otherwise_are_not_taken_and_a_higher_limit_goes_on(
    bench: Evaluate, llama: tuple[Any, Any], out: Path, tmp_path: Path
) -> None:
    before = (out / "gsm8k.answers.jsonl").read_bytes()
    for changes in ({"instruction": ""}, {"max_new_tokens": 9}, {"template": "alpaca"}):
        with rejects("other-settings", str(out), of=CheckpointError) as caught:
            attrs.evolve(bench, **changes).run(*llama, out)
        assert caught.value.message.endswith(f": {', '.join(changes)}")
    assert (out / "gsm8k.answers.jsonl").read_bytes() == before
    limited = tmp_path / "limited"
    only = attrs.evolve(bench, benchmarks=("gsm8k",), limit=2)
    assert only.run(*llama, limited)["gsm8k"]["n"] == 2
    assert attrs.evolve(only, limit=5, batch_size=1).run(*llama, limited)["gsm8k"]["n"] == 5
    other = attrs.evolve(bench, benchmarks=("math",))
    for stage in (only, other):
        with rejects("other-settings", str(limited), of=CheckpointError):
            stage.run(*small_model(seed=1), limited)
    other.run(*llama, limited)
    assert set(json.loads((limited / "results.json").read_text())) == {"gsm8k", "math"}


def test_missing_and_malformed_files_are_named(
    bench: Evaluate,
    llama: tuple[Any, Any],
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = out / "gsm8k.answers.jsonl"
    answers.write_text("{oops\n" + answers.read_text())
    with rejects("wrong-row", str(answers), 1, of=CheckpointError):
        bench.run(*llama, out)
    path = tmp_path / "gsm8k.jsonl"
    only = attrs.evolve(bench, benchmarks=("gsm8k",), paths={"gsm8k": str(path)})
    with rejects("missing-file", str(path), of=DataError):
        only.run(*llama, tmp_path / "new")
    good = '{"question": "?", "answer": "#### 1"}\n'
    for text, code, *line in (
        (good + '{"question": 5}\n', "wrong-row", 2),
        (good + '\n{"question"\n', "wrong-row", 3),
        ('{"question": "?", "answer": "one"}\n', "wrong-row", 1),
        ("\n", "no-rows"),
    ):
        path.write_text(text)
        with rejects(code, str(path), *line, of=DataError):
            only.run(*llama, tmp_path / "new")
    monkeypatch.delenv("HGMS_DATA", raising=False)
    with rejects("missing-variable", "evaluate", "paths", "gsm8k", of=DataError):
        attrs.evolve(only, paths={}).run(*llama, tmp_path / "new")


def test_the_table_is_read_and_wrong_settings_are_rejected() -> None:
    converter = converter_for(Registry.load())
    judge = {"base_url": "http://localhost:1/v1", "model": "m"}
    fields: dict[str, Any] = {"limit": 3, "paths": {"math": "x"}}
    read_back = converter.structure({"benchmarks": ["math"], "judge": judge, **fields}, Evaluate)
    assert read_back == Evaluate(benchmarks=("math",), judge=Judge(**judge), **fields)
    assert converter.structure({"judge": "none"}, Evaluate).judge is None
    assert Evaluate().judge == Judge()
    wrong: dict[str, Any]
    for code, wrong in (
        ("unknown-benchmark", {"benchmarks": ("gsm8k", "aime")}),
        ("wrong-value", {"benchmarks": ("math", "math")}),
        ("unknown-benchmark", {"paths": {"gsm": "x"}}),
        ("out-of-range", {"limit": 0}),
        ("unknown-choice", {"engine": "tgi"}),
    ):
        with rejects(code, *wrong, of=ConfigError):
            Evaluate(**wrong)
