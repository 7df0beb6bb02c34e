"""The losses of a model on every row of a token table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core.errors import OutOfMemory
from hgms_core.torch_errors import out_of_memory
from hgms_mix.lm import is_in_parts
from hgms_mix.stages.batches import IGNORED, collate

if TYPE_CHECKING:
    from hgms.distributed import Ranks


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

    @classmethod
    def of(cls, table: dict[str, Any]) -> RowLosses:
        return cls(
            total=torch.tensor(table["total"], dtype=torch.float64),
            tokens=torch.tensor(table["tokens"]),
        )


def row_losses(model: Any, table: Any, *, rows: int = 8, ranks: Ranks | None = None) -> RowLosses:
    """Compute the losses of a token table's rows, without dropout.

    Each batch has ``rows`` rows of similar length (halved if memory runs out). All ``ranks`` call
    this function. Each rank computes some of the batches, and all ranks return the same losses as
    one process.

    Cost: one forward pass over the table.

    Raises:
        OutOfMemory: a single row does not fit.
    """
    error: Exception | None = None
    losses = RowLosses(
        *(torch.zeros(len(table.lengths), dtype=dtype) for dtype in (torch.float64, torch.int64))
    )
    try:
        _row_losses(
            model.eval(),
            table,
            rows,
            losses,
            (0, 1) if ranks is None else (ranks.rank, ranks.count),
        )
    except (RuntimeError, MemoryError) as failure:
        if not out_of_memory(failure):
            raise
        if is_in_parts(model):  # the other ranks are in the middle of a batch with this rank
            raise OutOfMemory(
                "out-of-memory",
                "evaluation ran out of memory with a sharded base model",
                place=("task", "max_length"),
                hint="decrease max_length",
            ) from failure
        error = failure
    if error is None if ranks is None else not ranks.any(error is not None):
        if ranks is None:
            return losses
        # each row is computed on one rank; the other ranks add 0
        return RowLosses(total=ranks.total(losses.total), tokens=ranks.total(losses.tokens))
    if rows == 1:
        raise OutOfMemory(
            "out-of-memory",
            "evaluation ran out of memory on a single row",
            place=("task", "max_length"),
            hint="decrease max_length",
        ) from error
    return row_losses(model, table, rows=rows // 2, ranks=ranks)


def _row_losses(
    model: Any, table: Any, rows: int, losses: RowLosses, share: tuple[int, int]
) -> None:
    """Fill in the losses of a rank's share (rank, number of ranks) of the batches."""
    device = next(model.parameters()).device
    rank, count = share
    pieces = table.lengths.argsort(stable=True).split(rows)
    own = pieces[rank::count]
    # with a base in parts, all ranks must call it equally often
    for number in range(len(pieces[::count]) if is_in_parts(model) else len(own)):
        piece = own[number] if number < len(own) else pieces[0]
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
        if number < len(own):
            losses.total[piece] = nll.double().sum(1).cpu()
            losses.tokens[piece] = (target != IGNORED).sum(1).cpu()
