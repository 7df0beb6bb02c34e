"""Greedy answers: a batch gives what single prompts give; a run goes on where it stopped; the
folder knows what made it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects

from hgms.config.convert import converter_for
from hgms_core import CheckpointError, ConfigError, DataError
from hgms_core.registry import Registry
from hgms_mix.evaluation import Evaluate, Judge, Verifier
from hgms_mix.evaluation.generate import Prompts, fingerprint, prompt_cap, replies
from hgms_mix.lm import BaseModel

transformers = pytest.importorskip("transformers", reason="the extra hgms[llm] is not installed")

SMALL = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 512},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    },
    "qwen2": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "gemma2": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 8,  # shorter than the prompts
    },
}


def small_model(kind: str = "llama", seed: int = 0) -> tuple[Any, Any]:
    # Gemma 2's attention takes its softmax in float32, where a float64 mask is −∞, and a row of
    # padding alone NaN
    dtype = "float32" if kind == "gemma2" else "float64"
    config = {"model_type": kind, **SMALL[kind], "initializer_range": 0.4}
    base = BaseModel(config=config, tokenizer="bytes", seed=seed, dtype=dtype)
    tokenizer = base.load_tokenizer()
    return base.load(torch.device("cpu"), torch.float64, len(tokenizer)), tokenizer


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    return small_model()


def prompts(tokenizer: Any) -> list[list[int]]:
    texts = [
        "a",
        "What is 2 + 2?",
        "Why?",
        "x" * 40,
        "Tell me about the sea and its waves.",
        "1 + 1 =",
        "?",
    ]
    return [tokenizer(text)["input_ids"] for text in texts]


def answer(
    model: Any,
    tokenizer: Any,
    tokens: list[list[int]],
    report: Callable[[str], None] = print,
    **changes: Any,
) -> list[Any]:
    options: dict[str, Any] = {"stops": [257], "cap": 100, "new_tokens": 12, **changes}
    batch_size = options.pop("batch_size", 4)
    batches = replies(model, tokenizer, Prompts(tokens, **options), batch_size, report)
    answers = dict(pair for batch in batches for pair in batch)
    return [answers[place] for place in range(len(tokens))]


def by_hand(
    model: Any, prompt: list[int], count: int, stops: tuple[int, ...] = (257,)
) -> list[int]:
    """One prompt, no padding, no cache: the most likely next token, again and again."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", list(SMALL))
def test_a_batch_gives_what_single_prompts_give(kind: str) -> None:
    model, tokenizer = small_model(kind)
    questions = prompts(tokenizer)
    expected = [by_hand(model, prompt, 12) for prompt in questions]
    assert len({tuple(tokens) for tokens in expected}) >= 5  # answers that differ
    for size in (1, 3, 7):
        answers = answer(model, tokenizer, questions, batch_size=size)
        assert [reply.text for reply in answers] == [
            tokenizer.decode(t, skip_special_tokens=True).strip() for t in expected
        ]
        assert [reply.prompt_tokens for reply in answers] == [len(prompt) for prompt in questions]


def test_an_answer_ends_at_a_stop_token_and_not_otherwise(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    questions = prompts(tokenizer)
    free = [by_hand(model, prompt, 12, stops=()) for prompt in questions]
    stop = free[1][4]
    answers = answer(model, tokenizer, questions, stops=[stop])
    for reply, tokens in zip(answers, free, strict=True):
        ended = stop in tokens
        kept = tokens[: tokens.index(stop)] if ended else tokens
        assert reply.finished == ended
        assert reply.new_tokens == len(kept) + ended
        assert reply.text == tokenizer.decode(kept, skip_special_tokens=True).strip()
    assert {reply.finished for reply in answers} == {True, False}


def test_a_long_prompt_loses_its_beginning(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    tokens = prompts(tokenizer)
    cut = answer(model, tokenizer, tokens, cap=10)
    assert [reply.truncated for reply in cut] == [len(prompt) > 10 for prompt in tokens]
    assert [reply.text for reply in cut] == [
        reply.text for reply in answer(model, tokenizer, [prompt[-10:] for prompt in tokens])
    ]
    assert prompt_cap(model, 1024, 12) == 500
    with rejects("out-of-range", "evaluate", "max_new_tokens", of=ConfigError):
        prompt_cap(model, 1024, 512)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_models_own_generation_settings_take_no_part_and_stay(adapter: bool) -> None:
    inner, tokenizer = small_model()
    model = inner
    if adapter:
        peft = pytest.importorskip("peft", reason="the extra hgms[llm] is not installed")
        model = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["q_proj"])).double()
    tokens = prompts(tokenizer)
    plain = answer(model, tokenizer, tokens)
    own = transformers.GenerationConfig(
        do_sample=True, temperature=5.0, repetition_penalty=1.8, min_new_tokens=3
    )
    inner.generation_config = own
    model.train()
    assert answer(model, tokenizer, tokens) == plain
    assert inner.generation_config is own
    assert model.generation_config is own
    assert model.training


def test_a_batch_that_does_not_fit_is_halved_and_said(
    llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = llama
    tokens = prompts(tokenizer)
    plain = answer(*llama, prompts(tokenizer))
    generate = model.generate
    sizes = []
    most = 2

    def small(**inputs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", small)
    reports: list[str] = []
    assert answer(model, tokenizer, tokens, reports.append, batch_size=5) == plain
    assert sizes == [5, 2, 2, 2, 1]
    assert reports == [
        "out of memory with 5 prompts at once: going on with 2 (evaluate.batch_size)"
    ]
    most = 0
    with rejects("out-of-memory", "evaluate") as caught:
        answer(model, tokenizer, tokens)
    assert "40 tokens and 12 new" in caught.value.message


def test_the_fingerprint_tells_models_apart(llama: tuple[Any, Any]) -> None:
    model, _ = llama
    first = fingerprint(model)
    assert fingerprint(small_model()[0]) == first
    assert fingerprint(small_model(seed=1)[0]) != first


# --- the stage
# --------------------------------------------------------------------------------------------------

CATEGORIES = ("writing", "math")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier() as process:
        yield process


@pytest.fixture(autouse=True)
def _one_worker(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this file share one worker process: starting it takes a second."""
    monkeypatch.setattr(
        "hgms_mix.evaluation.evaluate.Verifier", lambda: contextlib.nullcontext(verifier)
    )


@pytest.fixture
def stage(tmp_path: Path) -> Evaluate:
    """Nine sums as GSM8K, four problems as MATH, two conversations as MT-Bench."""
    sums = [
        {"question": f"What is {k} + {'1 + ' * k}1?", "answer": f"It is\n#### {2 * k + 1}"}
        for k in range(9)
    ]
    problems = [
        {"problem": f"Solve {k}x = 1", "solution": rf"So $\boxed{{\frac{{1}}{{{k}}}}}$."}
        for k in range(2, 6)
    ]
    folder = tmp_path / "mt_bench"
    folder.mkdir()
    talks = [
        {"question_id": k, "category": category, "turns": [f"{category}?", "And why?"]}
        for k, category in enumerate(CATEGORIES)
    ]
    references = [{"question_id": 1, "choices": [{"turns": ["one", "two"]}]}]
    lines(tmp_path / "gsm8k.jsonl", sums)
    lines(tmp_path / "math.jsonl", problems)
    lines(folder / "question.jsonl", talks)
    lines(folder / "reference_answer_gpt-4.jsonl", references)
    names = ("single-v1", "single-math-v1", "single-v1-multi-turn", "single-math-v1-multi-turn")
    lines(
        folder / "judge_prompts.jsonl",
        [{"name": name, "system_prompt": "", "prompt_template": "Rate."} for name in names],
    )
    paths = {
        "gsm8k": str(tmp_path / "gsm8k.jsonl"),
        "math": str(tmp_path / "math.jsonl"),
        "mt-bench": str(folder),
    }
    return Evaluate(
        benchmarks=("gsm8k", "math", "mt-bench"),
        paths=paths,
        template="plain",
        max_new_tokens=8,
        batch_size=3,
        judge=None,
    )


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_answers_scores_and_counts(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path
) -> None:
    reports: list[str] = []
    folder = tmp_path / "out"
    results = stage.run(*llama, folder, reports.append)
    assert results == json.loads((folder / "results.json").read_text())
    gsm8k, math, talks = (results[name] for name in stage.benchmarks)
    assert (gsm8k["n"], gsm8k["paper_n"], math["n"], math["paper_n"]) == (9, 1319, 4, 4989)
    assert gsm8k["score"] == 0.0
    assert gsm8k["interval"]["low"] == 0.0 < gsm8k["interval"]["high"]
    assert gsm8k["answers_unfinished"] == 9
    assert gsm8k["new_tokens"] == 72
    assert (talks["score"], talks["rated"], talks["failed"]) == (None, 0, 4)
    answers = read(folder / "gsm8k.answers.jsonl")
    assert sorted(record["id"] for record in answers) == list(range(9))
    assert [record["prompt_tokens"] for record in answers] == sorted(
        (r["prompt_tokens"] for r in answers), reverse=True
    )
    assert [record["id"] for record in read(folder / "gsm8k.scores.jsonl")] == list(range(9))
    assert "gsm8k: 9 of 9 answered" in reports


def test_the_prompt_is_the_question_and_the_instruction(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = llama
    stage.run(model, tokenizer, tmp_path / "out")
    text = (
        "What is 0 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
    )
    expected = tokenizer.decode(
        by_hand(model, tokenizer(text)["input_ids"], 8), skip_special_tokens=True
    ).strip()
    assert (
        next(r for r in read(tmp_path / "out" / "gsm8k.answers.jsonl") if r["id"] == 0)["text"]
        == expected
    )
    # the second turn of a conversation follows the model's own first answer, which ends as in
    # training
    turns = {(r["id"], r["turn"]): r for r in read(tmp_path / "out" / "mt-bench.answers.jsonl")}
    talk = [
        *tokenizer("writing?\n" + turns[0, 1]["text"])["input_ids"],
        257,
        *tokenizer("And why?\n")["input_ids"],
    ]
    assert turns[0, 2]["prompt_tokens"] == len(talk)
    assert (
        turns[0, 2]["text"]
        == tokenizer.decode(by_hand(model, talk, 8), skip_special_tokens=True).strip()
    )


def test_right_answers_are_found_right(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = llama
    folder = tmp_path / "out"
    stage.run(model, tokenizer, folder)
    # the model's answers replaced by right ones, a wrong one and none
    rows = read(folder / "gsm8k.answers.jsonl")
    for row in rows:
        row["text"] = {3: "I give up", 4: r"It is \boxed{900}"}.get(
            row["id"], rf"Thus \boxed{{{2 * row['id'] + 1}}} in all"
        )
    lines(folder / "gsm8k.answers.jsonl", rows)
    monkeypatch.setattr(model, "generate", None)  # nothing is asked again
    result = stage.run(model, tokenizer, folder)["gsm8k"]
    assert (result["correct"], result["no_answer"]) == (7, 1)
    assert result["score"] == pytest.approx(100 * 7 / 9)


def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = llama
    whole = stage.run(model, tokenizer, tmp_path / "whole")

    def interrupt(text: str) -> None:
        if text == "math: 3 of 4 answered":
            raise KeyboardInterrupt

    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        stage.run(model, tokenizer, folder, interrupt)
    path = folder / "math.answers.jsonl"
    assert len(read(path)) == 3
    text = path.read_text()
    path.write_text(text[:-20])  # the last line was half written
    generate = model.generate
    rows = []

    def counted(**inputs: Any) -> Any:
        rows.append(len(inputs["input_ids"]))
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", counted)
    assert stage.run(model, tokenizer, folder) == whole
    assert rows == [2, 2, 2]  # two problems of MATH, two conversations of two turns
    for name in stage.benchmarks:
        key = lambda record: (record["id"], record["turn"])  # noqa: E731
        assert sorted(read(folder / f"{name}.answers.jsonl"), key=key) == sorted(
            read(tmp_path / "whole" / f"{name}.answers.jsonl"), key=key
        )
    assert (folder / "math.scores.jsonl").read_text() == (
        tmp_path / "whole" / "math.scores.jsonl"
    ).read_text()


def test_a_judge_that_cannot_be_reached_costs_no_answers(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    judged = attrs.evolve(
        stage, judge=Judge(base_url="http://127.0.0.1:9/v1", retries=1, backoff=0.0, timeout=1.0)
    )
    with rejects("judge-failed", "evaluate", "judge") as caught:
        judged.run(*llama, folder)
    assert "gpt-4o at http://127.0.0.1:9/v1" in caught.value.message
    results = json.loads((folder / "results.json").read_text())
    assert (results["gsm8k"]["n"], results["math"]["n"], results["mt-bench"]["score"]) == (
        9,
        4,
        None,
    )
    assert len(read(folder / "mt-bench.answers.jsonl")) == 4


def test_a_missing_key_is_said_before_anything_is_generated(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with rejects("missing-variable", "evaluate", "judge", "api_key_env", of=ConfigError) as caught:
        attrs.evolve(stage, judge=Judge()).run(*llama, tmp_path / "out")
    assert "OPENAI_API_KEY" in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes", [{"instruction": ""}, {"max_new_tokens": 9}, {"template": "alpaca"}]
)
def test_answers_made_otherwise_are_not_taken(
    changes: dict[str, Any], stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path
) -> None:
    stage.run(*llama, tmp_path / "out")
    before = (tmp_path / "out" / "gsm8k.answers.jsonl").read_bytes()
    with rejects("other-settings", str(tmp_path / "out"), of=CheckpointError) as caught:
        attrs.evolve(stage, **changes).run(*llama, tmp_path / "out")
    assert "gsm8k" in caught.value.message
    assert caught.value.message.endswith(f": {', '.join(changes)}")
    assert (tmp_path / "out" / "gsm8k.answers.jsonl").read_bytes() == before


def test_another_models_answers_are_not_taken_and_a_higher_limit_goes_on(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path
) -> None:
    only = attrs.evolve(stage, benchmarks=("gsm8k",), limit=2)
    assert only.run(*llama, tmp_path / "out")["gsm8k"]["n"] == 2
    assert (
        attrs.evolve(only, limit=5, batch_size=1).run(*llama, tmp_path / "out")["gsm8k"]["n"] == 5
    )
    with rejects("other-settings", str(tmp_path / "out"), of=CheckpointError) as caught:
        only.run(*small_model(seed=1), tmp_path / "out")
    assert caught.value.message.endswith(": model")
    other = attrs.evolve(stage, benchmarks=("math",))
    with rejects("other-settings", str(tmp_path / "out"), of=CheckpointError) as caught:
        other.run(*small_model(seed=1), tmp_path / "out")
    assert "gsm8k" in caught.value.message
    assert set(other.run(*llama, tmp_path / "out")) == {"math"}
    assert set(json.loads((tmp_path / "out" / "results.json").read_text())) == {"gsm8k", "math"}


def test_a_broken_line_between_others_is_named(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path
) -> None:
    stage.run(*llama, tmp_path / "out")
    path = tmp_path / "out" / "gsm8k.answers.jsonl"
    path.write_text("{oops\n" + path.read_text())
    with rejects("wrong-row", str(path), 1, of=CheckpointError):
        stage.run(*llama, tmp_path / "out")


def test_missing_and_malformed_benchmarks_are_named(
    stage: Evaluate, llama: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = attrs.evolve(stage, benchmarks=("gsm8k",))
    path = Path(stage.paths["gsm8k"])
    for text, line, part in [
        ('{"question": "?", "answer": "#### 1"}\n{"question": 5}\n', 2, "'question'"),
        ('{"question": "?", "answer": "#### 1"}\n\n{"question"\n', 3, "JSON"),
        ('{"question": "?", "answer": "one"}\n', 1, "'####'"),
    ]:
        path.write_text(text)
        with rejects("wrong-row", str(path), line, of=DataError) as caught:
            only.run(*llama, tmp_path / "out")
        assert part in caught.value.message
    path.write_text("\n")
    with rejects("no-rows", str(path), of=DataError):
        only.run(*llama, tmp_path / "out")
    path.unlink()
    with rejects("missing-file", str(path), of=DataError):
        only.run(*llama, tmp_path / "out")
    monkeypatch.delenv("HGMS_DATA", raising=False)
    with rejects("missing-variable", "evaluate", "paths", "gsm8k", of=DataError):
        attrs.evolve(only, paths={}).run(*llama, tmp_path / "out")


def test_the_table_is_read_like_any_configuration() -> None:
    converter = converter_for(Registry.load())
    table = {
        "benchmarks": ["math"],
        "judge": {"base_url": "http://localhost:1/v1", "model": "m"},
        "limit": 3,
        "paths": {"math": "x"},
    }
    assert converter.structure(table, Evaluate) == Evaluate(
        benchmarks=("math",),
        judge=Judge(base_url="http://localhost:1/v1", model="m"),
        limit=3,
        paths={"math": "x"},
    )
    assert converter.structure({"judge": "none"}, Evaluate).judge is None
    assert Evaluate().judge == Judge()


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"benchmarks": ("gsm8k", "aime")}, "unknown-benchmark"),
        ({"benchmarks": ("math", "math")}, "wrong-value"),
        ({"paths": {"gsm": "x"}}, "unknown-benchmark"),
        ({"limit": 0}, "out-of-range"),
        ({"engine": "tgi"}, "unknown-choice"),
    ],
)
def test_wrong_settings_are_refused(table: dict[str, Any], code: str) -> None:
    with rejects(code, *table, of=ConfigError):
        Evaluate(**table)
