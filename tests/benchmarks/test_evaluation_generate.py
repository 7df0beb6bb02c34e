"""Greedy answers: a batch gives what single prompts give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluation.generate import Prompts, fingerprint, prompt_cap, replies
from support.generation import SMALL, by_hand, small_model

transformers = pytest.importorskip("transformers", reason="the extra hgms[scores] is not installed")

pytestmark = pytest.mark.extended
TEXTS = ("a", "What is 2 + 2?", "Why?", "x" * 40, "Tell me about the sea.", "1 + 1 =", "?")


def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def answer(
    model: Any,
    tokenizer: Any,
    tokens: list[list[int]],
    report: Callable[[str], None] = print,
    batch_size: int = 4,
    **changes: Any,
) -> list[Any]:
    options: dict[str, Any] = {"stops": [257], "cap": 100, "new_tokens": 12, **changes}
    batches = replies(model, tokenizer, Prompts(tokens, **options), batch_size, report)
    answers = dict(pair for batch in batches for pair in batch)
    return [answers[place] for place in range(len(tokens))]


@pytest.mark.parametrize("kind", list(SMALL))
def test_a_batch_gives_what_single_prompts_give(kind: str) -> None:
    model, tokenizer = small_model(kind)
    questions = prompts(tokenizer)
    expected = [by_hand(model, prompt, 8) for prompt in questions]
    assert len({tuple(tokens) for tokens in expected}) >= 5  # answers that differ
    texts = [tokenizer.decode(t, skip_special_tokens=True).strip() for t in expected]
    for size in (1, 3):
        answers = answer(model, tokenizer, questions, batch_size=size, new_tokens=8)
        assert [(reply.text, reply.prompt_tokens) for reply in answers] == [
            (text, len(prompt)) for text, prompt in zip(texts, questions, strict=True)
        ]


def test_an_answer_ends_at_a_stop_token_and_not_otherwise(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    questions = prompts(tokenizer)
    free = [by_hand(model, prompt, 12, stops=()) for prompt in questions]
    stop = free[1][4]
    kept = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in free]
    answers = answer(model, tokenizer, questions, stops=[stop])
    assert [(reply.finished, reply.new_tokens, reply.text) for reply in answers] == [
        (
            stop in tokens,
            len(text) + (stop in tokens),
            tokenizer.decode(text, skip_special_tokens=True).strip(),
        )
        for tokens, text in zip(free, kept, strict=True)
    ]
    assert {reply.finished for reply in answers} == {True, False}


def test_a_long_prompt_loses_its_beginning(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    tokens = prompts(tokenizer)
    cut = answer(model, tokenizer, tokens, cap=10)
    short = answer(model, tokenizer, [prompt[-10:] for prompt in tokens])
    assert [(reply.truncated, reply.text) for reply in cut] == [
        (len(prompt) > 10, reply.text) for prompt, reply in zip(tokens, short, strict=True)
    ]
    assert prompt_cap(model, 1024, 12) == 500


def test_a_batch_that_does_not_fit_is_halved_and_said(
    llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = llama
    tokens = prompts(tokenizer)
    plain = answer(model, tokenizer, tokens, new_tokens=4)
    sizes: list[int] = []

    def small(generate: Any = model.generate, **inputs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", small)
    reports: list[str] = []
    halved = answer(model, tokenizer, tokens, reports.append, batch_size=5, new_tokens=4)
    assert (halved, sizes, len(reports)) == (plain, [5, 2, 2, 2, 1], 1)


def test_the_fingerprint_tells_models_apart(llama: tuple[Any, Any]) -> None:
    same, other = (fingerprint(small_model(seed=seed)[0]) for seed in (0, 1))
    assert fingerprint(llama[0]) == same != other
