"""Rows for trainers that read conversations of TRL's kinds (TRL itself, and whatever loads them through ``datasets``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hgms_exchange.sampled import Part, Sampled


def dialogues(sample: Sampled, part: Part) -> Iterator[dict[str, Any]]:
    """With a chat template: ``prompt`` and ``completion`` as turns, or ``messages`` where some row has several answers. With a
    named template: both as texts, in the words that reweighting saw."""
    if not sample.chat:
        for pieces in sample.written(part):
            prompt, completion = sample.pair(pieces, bos=False, eos=True)
            yield {"prompt": prompt, "completion": completion}
    elif sample.turns > 1:
        yield from ({"messages": row["messages"]} for row in part.rows)
    else:
        yield from ({"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in part.rows)


def only_last(sample: Sampled) -> list[str]:
    """What is lost where a trainer takes prompt and answer as two texts."""
    if sample.chat or sample.turns == 1:
        return []
    return ["Some rows have several answers; here only the last one is learned from, where `hgms mix` learns from all."]
