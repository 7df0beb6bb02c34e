"""A token table: all rows of a source as tokens in one flat array.

On disk, the file name identifies the inputs of the table. The file is memory-mapped for reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from hgms.arguments import require
from hgms.store import Digest
from hgms_mix.lm.models import positions_of


@final
@frozen(kw_only=True)
class Report:
    """Counts of a source's rows.

    ``examples`` were read as requested, and ``bad`` rows of the file's ``total`` were skipped.
    ``blank`` rows have no answer to learn. ``looked`` of the other rows were tokenised. Of these,
    ``too_long`` have more than the allowed tokens and were dropped, and ``truncated`` were cut.
    ``longest`` and ``shortest`` are in tokens, before rows were cut.
    """

    format: str = ""
    total: int = 0
    bad: int = 0
    examples: int = 0
    blank: int = 0
    looked: int = 0
    too_long: int = 0
    truncated: int = 0
    longest: int = 0
    shortest: int = 0


@final
@frozen(eq=False)
class TokenTable:
    """Rows of tokens in one flat array, with a mask of the answers.

    Row ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, and ``mask`` marks its answers. ``rows``
    are the rows' numbers in the source, and ``digest`` identifies all inputs of the table.

    Examples
    --------
    >>> table = TokenTable(
    ...     "s",
    ...     torch.tensor([5, 6, 7], dtype=torch.int32),
    ...     torch.tensor([False, True, True]),
    ...     torch.tensor([0, 1, 3]),
    ...     torch.tensor([0, 1]),
    ...     "digest",
    ...     pad_id=9,
    ... )
    >>> table.gather(torch.tensor([[0], [1]]))[0].tolist()
    [[[5, 9]], [[6, 7]]]
    """

    name: str
    tokens: Tensor
    mask: Tensor
    offsets: Tensor
    rows: Tensor
    digest: str
    pad_id: int = 0
    report: Report = Report()

    @property
    def size(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens per row."""
        return self.offsets.diff()

    @property
    def places(self) -> dict[int, int]:
        """Return the position in the table of each row of the source."""
        return {row: position for position, row in enumerate(self.rows.tolist())}

    def row(self, position: int) -> tuple[Tensor, Tensor]:
        """Return tokens and mask of one row."""
        cut = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
        return self.tokens[cut], self.mask[cut]

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (int64) and mask of the rows in ``index`` (any shape).

        Rows are padded on the right to the longest of them: ``[*index.shape, T]``. The padding is
        ``pad_id`` and is never in the mask.
        """
        where, inside = self._positions(index)
        tokens = torch.where(inside, self.tokens[where].long(), self.pad_id)
        return tokens, self.mask[where] & inside

    def _positions(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions in the flat tensors for each requested row and column.

        Also return whether the row is long enough for the column.
        """
        index = index.to(self.offsets.device)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.size):
            raise IndexError(
                f"rows {int(index.min())} … {int(index.max())} of a table of {self.size}"
            )
        start = self.offsets[index]
        length = self.offsets[index + 1] - start
        columns = torch.arange(int(length.max()) if length.numel() else 0, device=start.device)
        inside = columns < length.unsqueeze(-1)
        return torch.where(inside, start.unsqueeze(-1) + columns, 0), inside

    def take(self, index: Tensor) -> TokenTable:
        """Return the table of these rows (a 1-D ``index``), in that order.

        Its digest depends on the digest of this table and on ``index``.
        """
        index = index.to(self.offsets.device, torch.int64)
        where, inside = self._positions(index)
        flat = where[inside]
        sha = Digest(self.digest, index.cpu().numpy().tobytes())
        return attrs.evolve(
            self,
            tokens=self.tokens[flat],
            mask=self.mask[flat],
            offsets=offsets_of(self.lengths[index]),
            rows=self.rows[index],
            digest=sha.text,
        )


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def skipped_rows(parts: Mapping[str, Mapping[str, TokenTable]]) -> str:
    """Return the message about unused rows, by part and name; empty if all rows are used."""
    lines = []
    for part, tables in parts.items():
        for name, table in tables.items():
            report = table.report
            read = report.examples + report.bad
            looked = report.looked
            some = {f"of {read}": {"bad": report.bad, "without an answer": report.blank}}
            shown = (
                f"of {read}" if looked >= report.examples - report.blank else f"of {looked} drawn"
            )
            some.setdefault(shown, {}).update(
                {"too long": report.too_long, "cut": report.truncated}
            )
            for of, counts in some.items():
                if listed := ", ".join(
                    f"{count} {what}" for what, count in counts.items() if count
                ):
                    lines.append(f"  {part} {name!r}: {listed}, {of}")
    return "\n".join(["rows skipped or cut:", *lines]) if lines else ""


TYPES = {"tokens": "int32", "mask": "bool", "lengths": "int64", "rows": "int64"}
"""The stored arrays of a table, and their types."""


def check_fits(model: Any, everything: Mapping[str, Mapping[str, TokenTable]]) -> None:
    """Raise ConfigError if the model has no vector for some token or position.

    The model itself would raise an index error.
    """
    tables = [table for tables in everything.values() for table in tables.values()]
    longest = max(int(table.lengths.max()) for table in tables)
    most = positions_of(model)
    require(
        most is None or longest <= most,
        "out-of-range",
        f"rows have up to {longest} tokens, but the model has {most} positions",
        place=("task", "max_length"),
        hint=f'set max_length = {most} or less, and too_long = "truncate" to cut rows rather '
        "than drop them",
    )
    highest = max(int(table.tokens.max()) for table in tables)
    known = model.get_input_embeddings().weight.shape[0]
    require(
        highest < known,
        "wrong-value",
        f"the tokenizer returns token {highest}, but the model has {known} tokens",
        place=("task", "model", "tokenizer"),
        hint="use the tokenizer of the model",
    )


def table_of(leaves: Mapping[str, np.ndarray], digest: str, report: Report) -> TokenTable:
    """Build a table from the arrays in ``TYPES``, without a name and a padding token."""
    tokens, mask, lengths, rows = (torch.from_numpy(leaves[leaf]) for leaf in TYPES)
    return TokenTable("", tokens, mask, offsets_of(lengths), rows, digest, report=report)
