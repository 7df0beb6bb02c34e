"""A token table: all rows of a source as tokens, laid end to end."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import final

import attrs
import torch
from attrs import field, frozen
from torch import Tensor


@final
@frozen(kw_only=True)
class Report:
    """What became of a source's rows: ``examples`` were read as asked (and ``bad`` rows left out of the file's ``total``);
    ``blank`` have no answer to learn, ``too_long`` more than the allowed tokens, and were dropped; ``truncated`` were cut;
    ``longest`` and ``shortest`` are in tokens, of all examples with an answer before any was cut."""

    format: str = ""
    total: int = 0
    bad: int = 0
    examples: int = 0
    blank: int = 0
    too_long: int = 0
    truncated: int = 0
    longest: int = 0
    shortest: int = 0

    @property
    def kept(self) -> int:
        return self.examples - self.blank - self.too_long


@final
@frozen(eq=False)
class TokenTable:
    """Rows of tokens laid end to end: row ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, and ``mask`` marks its answers.

    ``rows`` are the rows' numbers in the source, ``keys`` 64-bit digests of their normalised prompts (for exact matching),
    ``digest`` identifies everything that made the table.

    >>> table = TokenTable("s", torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, True]),
    ...                    torch.tensor([0, 1, 3]), torch.tensor([0, 1]), "digest", pad_id=9)
    >>> table.gather(torch.tensor([[0], [1]]))[0].tolist()
    [[[5, 9]], [[6, 7]]]
    """

    name: str
    tokens: Tensor
    mask: Tensor
    offsets: Tensor
    rows: Tensor
    digest: str
    keys: Tensor = field(factory=lambda: torch.zeros(0, dtype=torch.int64))
    pad_id: int = 0
    report: Report = Report()

    @property
    def size(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row."""
        return self.offsets.diff()

    @property
    def places(self) -> dict[int, int]:
        """Where in the table each row of the source is."""
        return {row: position for position, row in enumerate(self.rows.tolist())}

    def row(self, position: int) -> tuple[Tensor, Tensor]:
        """Tokens and mask of one row."""
        cut = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
        return self.tokens[cut], self.mask[cut]

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (int64) and mask of the rows numbered by ``index`` (any shape), right-padded to the longest of them:
        ``[*index.shape, T]``. Padding is ``pad_id`` and never in the mask."""
        where, inside = self._positions(index)
        tokens = torch.where(inside, self.tokens[where].long(), self.pad_id)
        return tokens, self.mask[where] & inside

    def _positions(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """For each asked row and column: a place in the flat tensors, and whether the row reaches that far."""
        index = index.to(self.offsets.device)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.size):
            raise IndexError(f"rows {int(index.min())} … {int(index.max())} of a table of {self.size}")
        start = self.offsets[index]
        length = self.offsets[index + 1] - start
        columns = torch.arange(int(length.max()) if length.numel() else 0, device=start.device)
        inside = columns < length.unsqueeze(-1)
        return torch.where(inside, start.unsqueeze(-1) + columns, 0), inside

    def take(self, index: Tensor) -> TokenTable:
        """The table of these rows (a 1-D ``index``), in that order; its digest is that of this table and of the choice."""
        index = index.to(self.offsets.device, torch.int64)
        where, inside = self._positions(index)
        flat = where[inside]
        sha = hashlib.sha256(self.digest.encode() + index.cpu().numpy().tobytes())
        return attrs.evolve(
            self,
            tokens=self.tokens[flat],
            mask=self.mask[flat],
            offsets=offsets_of(self.lengths[index]),
            rows=self.rows[index],
            keys=self.keys[index] if len(self.keys) else self.keys,
            digest=sha.hexdigest(),
        )


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def left_out(parts: Mapping[str, Mapping[str, TokenTable]]) -> str:
    """What to tell a person about rows that are not used, by part and name; empty where all are."""
    lines = []
    for part, tables in parts.items():
        for name, table in tables.items():
            report = table.report
            counts = {
                "bad": report.bad,
                "without an answer": report.blank,
                "too long": report.too_long,
                "cut": report.truncated,
            }
            listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            if listed:
                lines.append(f"  {part} {name!r}: {listed}, of {report.examples + report.bad}")
    return "\n".join(["rows left out or cut:", *lines]) if lines else ""
