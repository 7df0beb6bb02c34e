"""What stands in two sets: a model must not have been trained or tuned on what it is judged on, and a row that stands in two
sources, or often in one, is weighed more than once."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import final

from attrs import frozen

from hgms_llm.sources import Example
from hgms_llm.table import TokenTable
from hgms_llm.tokens import key_of

Rows = TokenTable | Sequence[Example]
SHOWN = 5
COPIES = 0.05
"""The share of copies in a source from which they are told: real sets hold some."""


@final
@frozen
class Overlap:
    """``count`` of the ``size`` rows of ``part`` set ``name`` have a prompt that ``other_part`` set ``other`` has as well;
    ``rows`` are the numbers of the first few. Of two training sources it is the whole row, prompt and answer, that both have;
    where ``name`` is ``other``, the rows are copies of an earlier one."""

    part: str
    name: str
    other_part: str
    other: str
    count: int
    size: int
    rows: tuple[int, ...]

    def __str__(self) -> str:
        some = ", ".join(map(str, self.rows)) + (", …" if self.count > len(self.rows) else "")
        share = f"{self.count} of {self.size} ({self.count / self.size:.1%})"
        if (self.part, self.name) == (self.other_part, self.other):
            return f"  {self.part} {self.name!r}: {share} are copies of an earlier row; rows {some}"
        return f"  {self.part} {self.name!r} and {self.other_part} {self.other!r}: {share}; rows {some} of {self.name!r}"


def overlaps(
    train: Mapping[str, Rows], validation: Mapping[str, Rows] | None = None, test: Mapping[str, Rows] | None = None
) -> tuple[Overlap, ...]:
    """Exact matches of prompts (case folded, white space collapsed) of every validation and test set with every training
    source, and of every test set with every validation set; and of whole rows, of every training source with the ones before it
    and (from a share of 5 % on) with itself. Only pairs that share some.

    Sets are token tables, which carry digests of their prompts, or examples. Cost: one look-up per row and pair of sets.

    >>> from hgms_llm.formats import Message
    >>> def rows(*prompts):
    ...     return [Example((Message("user", prompt), Message("assistant", "a")), row) for row, prompt in enumerate(prompts)]
    >>> shared = overlaps({"s": rows("What is  1 + 1?")}, {"v": rows("what is 1 + 1?", "And 2 + 2?")})
    >>> [(overlap.name, overlap.other, overlap.count, overlap.size) for overlap in shared]
    [('v', 's', 1, 2)]
    >>> copies = overlaps({"s": rows("Why?", "How?"), "t": rows("When?", "When?", "How?")})
    >>> [(pair.name, pair.other, pair.count) for pair in copies]
    [('t', 's', 1), ('t', 't', 1)]
    """
    parts = {"train": train, "validation": validation or {}, "test": test or {}}
    keys = {part: {name: list(_prompts(rows)) for name, rows in sets.items()} for part, sets in parts.items()}
    known = {part: {name: {key for key, _ in pairs} for name, pairs in sets.items()} for part, sets in keys.items()}
    overlapping: list[Overlap] = []

    def add(part: str, name: str, other_part: str, other: str, rows: list[int], size: int) -> None:
        if rows:
            overlapping.append(Overlap(part, name, other_part, other, len(rows), size, tuple(rows[:SHOWN])))

    for part, other_part in (("validation", "train"), ("test", "train"), ("test", "validation")):
        for name, pairs in keys[part].items():
            for other, having in known[other_part].items():
                add(part, name, other_part, other, [row for key, row in pairs if key in having], len(pairs))
    before: dict[str, set[Hashable]] = {}
    for name, source in train.items():
        whole = list(_whole(source))
        for other, earlier in before.items():
            add("train", name, "train", other, [row for key, row in whole if key in earlier], len(whole))
        seen = before[name] = set()
        copies = [row for key, row in whole if key in seen or seen.add(key)]  # type: ignore[func-returns-value]
        if len(copies) >= COPIES * len(whole):
            add("train", name, "train", name, copies, len(whole))
    return tuple(overlapping)


def _whole(rows: Rows) -> Iterator[tuple[Hashable, int]]:
    """Each row as something that two rows share only where prompt and answer are the same, with its number."""
    if not isinstance(rows, TokenTable):
        yield from ((example.messages, example.row) for example in rows)
        return
    tokens, mask, cuts = rows.tokens.numpy(), rows.mask.numpy(), rows.offsets.tolist()
    for number, first, last in zip(rows.rows.tolist(), cuts, cuts[1:], strict=False):
        row = tokens[first:last].tobytes() + mask[first:last].tobytes()
        yield hashlib.blake2b(row, digest_size=16).digest(), number


def _prompts(rows: Rows) -> Iterable[tuple[int, int]]:
    if isinstance(rows, TokenTable):
        return zip(rows.keys.tolist(), rows.rows.tolist(), strict=True)
    return ((key_of(example.key), example.row) for example in rows)


def overlap_warning(overlapping: Sequence[Overlap]) -> str:
    """What to tell a person: one line per pair of sets, and what to do; empty where nothing overlaps."""
    lines = []
    if judged := [str(overlap) for overlap in overlapping if overlap.part != "train"]:
        lines += ["prompts that stand in two sets (exact matches; case and white space do not count):", *judged]
        lines.append("  scores on such rows flatter whatever saw them before: take the rows out of one of the two sets")
    if copied := [str(overlap) for overlap in overlapping if overlap.part == "train"]:
        lines += ["rows that stand in two sources, or more than once in one (prompt and answer alike):", *copied]
        lines.append("  such rows are weighed more than once, and weights between two sources that share them mean little")
    return "\n".join(lines)
