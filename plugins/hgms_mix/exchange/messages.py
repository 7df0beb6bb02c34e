"""Rows of an export: conversations, prompts with answers as texts, and TRL's kinds of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hgms_mix.exchange.sample import Part, Sampled


def conversations(part: Part) -> Iterator[dict[str, Any]]:
    yield from ({"messages": row["messages"]} for row in part.rows)


def texts(
    sample: Sampled,
    part: Part,
    prompt: str = "prompt",
    completion: str = "completion",
    *,
    eos: bool = True,
) -> Iterator[dict[str, Any]]:
    """Prompt and last answer, under these keys, as the named template writes them, in the words
    that reweighting saw; ``eos``: with the end mark, where the trainer adds none."""
    for pieces in sample.written(part):
        question, answer = sample.pair(pieces, eos=eos)
        yield {prompt: question, completion: answer}


def dialogues(sample: Sampled, part: Part) -> Iterator[dict[str, Any]]:
    """TRL's kinds, with a chat template: ``prompt`` and ``completion`` as turns, or ``messages``
    where some row has several answers. With a named template: both as texts."""
    if not sample.chat:
        yield from texts(sample, part)
    elif sample.turns > 1:
        yield from conversations(part)
    else:
        yield from (
            {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
            for row in part.rows
        )


def only_last(sample: Sampled) -> list[str]:
    """What is lost where a trainer takes prompt and answer as two texts."""
    if sample.chat or sample.turns == 1:
        return []
    return [
        (
            "Some rows have several answers; here only the last one is learned from, where `hgms "
            "mix` learns from all."
        )
    ]
