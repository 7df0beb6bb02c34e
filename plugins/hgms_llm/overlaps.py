"""Prompts that stand in two sets: what a model is judged on, it must not have been trained or tuned on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from attrs import frozen

from hgms_llm.sources import Example
from hgms_llm.tokens import TokenTable, key_of

Rows = TokenTable | Sequence[Example]
SHOWN = 5


@final
@frozen
class Overlap:
    """``count`` of the ``size`` rows of ``part`` set ``name`` have a prompt that ``other_part`` set ``other`` has as well;
    ``rows`` are the numbers of the first few."""

    part: str
    name: str
    other_part: str
    other: str
    count: int
    size: int
    rows: tuple[int, ...]


def overlaps(
    train: Mapping[str, Rows], validation: Mapping[str, Rows] | None = None, test: Mapping[str, Rows] | None = None
) -> tuple[Overlap, ...]:
    """Exact matches of prompts (case folded, white space collapsed) of every validation and test set with every training
    source, and of every test set with every validation set; only pairs that share some.

    Sets are token tables, which carry digests of their prompts, or examples. Cost: one look-up per row and pair of sets.

    >>> from hgms_llm.formats import Message
    >>> def rows(*prompts):
    ...     return [Example((Message("user", prompt), Message("assistant", "a")), row) for row, prompt in enumerate(prompts)]
    >>> found = overlaps({"s": rows("What is  1 + 1?")}, {"v": rows("what is 1 + 1?", "And 2 + 2?")})
    >>> [(one.name, one.other, one.count, one.size) for one in found]
    [('v', 's', 1, 2)]
    """
    parts = {"train": train, "validation": validation or {}, "test": test or {}}
    keys = {part: {name: _keys(rows) for name, rows in sets.items()} for part, sets in parts.items()}
    known = {part: {name: {key for key, _ in pairs} for name, pairs in sets.items()} for part, sets in keys.items()}
    found = []
    for part, other_part in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for name, pairs in keys[part].items():
            for other, having in known[other_part].items():
                rows = [row for key, row in pairs if key in having]
                if rows:
                    found.append(Overlap(part, name, other_part, other, len(rows), len(pairs), tuple(rows[:SHOWN])))
    return tuple(found)


def _keys(rows: Rows) -> list[tuple[int, int]]:
    if isinstance(rows, TokenTable):
        return list(zip(rows.keys.tolist(), rows.rows.tolist(), strict=True))
    return [(key_of(example.key), example.row) for example in rows]


def overlap_warning(found: Sequence[Overlap]) -> str:
    """What to tell a person about ``found``: one line per pair of sets, and what to do; empty where there is nothing to say."""
    if not found:
        return ""
    lines = ["prompts that stand in two sets (exact matches; case and white space do not count):"]
    for one in found:
        some = ", ".join(map(str, one.rows)) + (", …" if one.count > len(one.rows) else "")
        share = f"{one.count} of {one.size} ({one.count / one.size:.1%})"
        lines.append(f"  {one.part} {one.name!r} and {one.other_part} {one.other!r}: {share}; rows {some} of {one.name!r}")
    lines.append("  scores on such rows flatter whatever saw them before: take the rows out of one of the two sets")
    return "\n".join(lines)
