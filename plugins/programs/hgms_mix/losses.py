"""The losses of a model on every row of a token table."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import OutOfMemory, out_of_memory
from hgms_mix.batches import IGNORED, collate


@frozen(kw_only=True, eq=False)
class RowLosses:
    """Σ −log p over the completion tokens of each row, and how many those are."""

    total: Tensor
    tokens: Tensor

    @property
    def per_row(self) -> Tensor:
        return self.total / self.tokens.clamp(min=1)

    def as_dict(self) -> dict[str, Any]:
        return {"total": self.total.tolist(), "tokens": self.tokens.tolist()}

    @classmethod
    def of(cls, table: dict[str, Any]) -> RowLosses:
        return cls(total=torch.tensor(table["total"], dtype=torch.float64), tokens=torch.tensor(table["tokens"]))


def row_losses(model: Any, table: Any, *, rows: int = 8) -> RowLosses:
    """The losses of a token table's rows, ``rows`` of similar length at a time (halved where memory runs out), without dropout.

    Cost: one forward pass over the table.

    Raises:
        OutOfMemory: not even one row fits.
    """
    try:
        return _row_losses(model.eval(), table, rows)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        if rows == 1:
            raise OutOfMemory("evaluation ran out of memory on a single row\n  lower task.max_length") from error
    return row_losses(model, table, rows=rows // 2)


def _row_losses(model: Any, table: Any, rows: int) -> RowLosses:
    device = next(model.parameters()).device
    lengths = table.lengths
    total, tokens = torch.zeros(len(lengths), dtype=torch.float64), torch.zeros(len(lengths), dtype=torch.int64)
    for piece in lengths.argsort(stable=True).split(rows):
        batch = collate([table.row(position) for position in piece.tolist()], table.pad_id)
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"].to(device), attention_mask=batch["attention_mask"].to(device), use_cache=False
            ).logits
        target = batch["labels"][:, 1:].to(device)
        nll = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), target.flatten(), ignore_index=IGNORED, reduction="none"
        ).reshape(target.shape)
        total[piece] = nll.double().sum(1).cpu()
        tokens[piece] = (target != IGNORED).sum(1).cpu()
    return RowLosses(total=total, tokens=tokens)
