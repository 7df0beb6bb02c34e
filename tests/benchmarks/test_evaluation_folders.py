"""An evaluation resumes where it stopped, and its folder records what made it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
from evaluation import Evaluate, Judge
from support.generation import by_hand, small_model
from support.helpers import rejects
from support.judge_files import good, read, sums, write_bench
from support.source_files import lines

from hgms_core.errors import CheckpointError, DataError

pytest.importorskip("transformers", reason="the extra hgms[scores] is not installed")

pytestmark = pytest.mark.extended


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
    gsm8k, math, _ = (results[name] for name in bench.benchmarks)
    assert (gsm8k["n"], gsm8k["paper_n"], math["n"], math["paper_n"]) == (9, 1319, 4, 4989)
    assert gsm8k["score"] == gsm8k["interval"]["low"] == 0.0 < gsm8k["interval"]["high"]
    answers = read(answered / "gsm8k.answers.jsonl")
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
    bench: Evaluate, llama: tuple[Any, Any], answered: Path, tmp_path: Path
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
    bench.run(*llama, folder)
    ours, theirs = (
        {file.name: sorted(file.read_text().splitlines()) for file in place.glob("*.jsonl")}
        for place in (folder, answered)
    )
    assert ours == theirs
    assert (folder / "results.json").read_bytes() == (answered / "results.json").read_bytes()


def test_answers_made_otherwise_are_not_taken_and_a_higher_limit_goes_on(
    bench: Evaluate, llama: tuple[Any, Any], out: Path, tmp_path: Path
) -> None:
    before = (out / "gsm8k.answers.jsonl").read_bytes()
    with rejects("other-settings", str(out / "manifest.json"), of=CheckpointError):
        attrs.evolve(bench, max_new_tokens=9).run(*llama, out)
    assert (out / "gsm8k.answers.jsonl").read_bytes() == before
    limited = tmp_path / "limited"
    only = attrs.evolve(bench, benchmarks=("gsm8k",), limit=2)
    assert only.run(*llama, limited)["gsm8k"]["n"] == 2
    assert attrs.evolve(only, limit=5, batch_size=1).run(*llama, limited)["gsm8k"]["n"] == 5
    with rejects("other-settings", str(limited / "manifest.json"), of=CheckpointError):
        only.run(*small_model(seed=1), limited)
    lines = Path(bench.paths["gsm8k"]).read_text().splitlines(keepends=True)
    other = tmp_path / "gsm8k.jsonl"
    other.write_text("".join(reversed(lines)))
    with rejects("data-changed", str(limited), of=CheckpointError):
        attrs.evolve(only, paths={"gsm8k": str(other)}).run(*llama, limited)
    (limited / "manifest.json").unlink()  # the settings of its responses are unknown
    with rejects("data-changed", str(limited), of=CheckpointError):
        only.run(*llama, limited)


def test_a_malformed_row_is_named(bench: Evaluate, llama: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "?", "answer": "#### 1"}\n{"question": 5}\n')
    only = attrs.evolve(bench, benchmarks=("gsm8k",), paths={"gsm8k": str(path)})
    with rejects("wrong-row", str(path), 2, of=DataError):
        only.run(*llama, tmp_path / "new")


def test_answers_are_rated_at_once_where_there_is_a_judge(
    bench: Evaluate, llama: tuple[Any, Any], out: Path, serve: Any
) -> None:
    endpoint = serve(good)
    judge = Judge(base_url=endpoint.url, model="m", retries=0)
    before = json.loads((out / "results.json").read_text())
    evaluation = attrs.evolve(bench, judge=judge, benchmarks=("mt-bench",))
    results = evaluation.run(*llama, out)
    rated = results["mt-bench"]
    assert (before["mt-bench"]["rated"], rated["rated"], len(endpoint.bodies)) == (0, 4, 4)
    stored = json.loads((out / "results.json").read_text())
    assert stored == {**before, "mt-bench": rated}
    assert results == {"mt-bench": rated}
