"""The losses of a model on every row of a token table."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core.errors import OutOfMemory
from hgms_core.torch_errors import out_of_memory
from hgms_mix.stages.batches import IGNORED, collate


@frozen(eq=False)
class RowLosses:
    """Σ −log p over the completion tokens of each row, and the number of these tokens."""

    total: Tensor
    tokens: Tensor

    @property
    def per_row(self) -> Tensor:
        return self.total / self.tokens.clamp(min=1)

    def as_dict(self) -> dict[str, Any]:
        return {"total": self.total.tolist(), "tokens": self.tokens.tolist()}


def row_losses(model: Any, table: Any, *, rows: int = 8) -> RowLosses:
    """Compute the losses of a token table's rows, without dropout.

    Each batch has ``rows`` rows of similar length (halved if memory runs out).

    Raises
    ------
    OutOfMemory
        a single row does not fit.

    Notes
    -----
    Cost: one forward pass over the table.
    """
    try:
        return _row_losses(model.eval(), table, rows)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        if rows == 1:
            raise OutOfMemory(
                "out-of-memory",
                "evaluation ran out of memory on a single row",
                place=("task", "max_length"),
                hint="decrease max_length",
            ) from error
    return row_losses(model, table, rows=rows // 2)


def _row_losses(model: Any, table: Any, rows: int) -> RowLosses:
    device = next(model.parameters()).device
    count = len(table.lengths)
    losses = RowLosses(
        total=torch.zeros(count, dtype=torch.float64), tokens=torch.zeros(count, dtype=torch.int64)
    )
    for piece in table.lengths.argsort(stable=True).split(rows):
        batch = collate([table.row(position) for position in piece.tolist()], table.pad_id)
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"].to(device),
                attention_mask=batch["attention_mask"].to(device),
                use_cache=False,
            ).logits
        target = batch["labels"][:, 1:].to(device)
        nll = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(),
            target.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        ).reshape(target.shape)
        losses.total[piece] = nll.double().sum(1).cpu()
        losses.tokens[piece] = (target != IGNORED).sum(1).cpu()
    return losses
