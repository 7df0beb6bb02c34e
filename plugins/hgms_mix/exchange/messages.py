"""Rows of an export: conversations, pairs of prompt and completion, and TRL's types of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hgms_core import ConfigError
from hgms_mix.exchange.sample import Part, Sampled, is_learned


def conversations(part: Part) -> Iterator[dict[str, Any]]:
    """Yield rows with a loss on all assistant turns.

    Errors: ConfigError for a row with an excluded answer: the trainer would learn it.
    """
    for row in part.rows:
        if not all(map(is_learned, row["messages"])):
            raise ConfigError(
                "not-supported",
                f"row {row['row']} of {part.name!r} has an answer with weight 0, which the "
                "trainer would learn",
                place=("task", "template"),
                hint='use a named template (template = "chatml"), or a trainer that takes a '
                "prompt and an answer: --to trl or --to datasets",
            )
        yield {"messages": row["messages"]}


def texts(sample: Sampled, part: Part) -> Iterator[dict[str, Any]]:
    """Yield prompt and last answer as the named template writes them.

    The texts equal the texts used for reweighting.
    """
    for pieces in sample.pieces_of(part):
        prompt, completion = sample.pair(pieces)
        yield {"prompt": prompt, "completion": completion}


def dialogues(sample: Sampled, part: Part) -> Iterator[dict[str, Any]]:
    """Yield TRL's row types.

    With a chat template, these are ``prompt`` and ``completion`` as turns, or ``messages`` if some
    row has several answers. With a named template, both are texts.
    """
    if not sample.chat:
        yield from texts(sample, part)
    elif sample.turns > 1:
        yield from conversations(part)
    else:
        yield from each_answer(part)


def each_answer(part: Part) -> Iterator[dict[str, Any]]:
    """Yield a row with ``prompt`` and ``completion`` as turns for each learned turn."""
    for row in part.rows:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
        for number, turn in enumerate(row["messages"]):
            if turn["role"] == "assistant" and is_learned(turn):
                yield {"prompt": turns[:number], "completion": [turns[number]]}


def only_last(sample: Sampled) -> list[str]:
    """Return notes on losses of data if a trainer reads prompt and answer as two texts."""
    if sample.chat or sample.turns == 1:
        return []
    return [
        "In rows with several answers, this export learns only the last; `hgms mix` learns all."
    ]
