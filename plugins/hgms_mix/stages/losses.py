"""The losses of a model on every row of a token table, and of the model before fine-tuning."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.config.as_table import plain
from hgms.store import Folder, json_digest
from hgms_core.errors import OutOfMemory
from hgms_core.torch_errors import out_of_memory
from hgms_mix.stages.batches import IGNORED, collate
from hgms_mix.stages.tuned_model import TunedModel

STORED = "losses.json"


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


def untuned_losses(model: TunedModel, folder: Path) -> dict[str, RowLosses]:
    """Return the losses of every row of the test sets before fine-tuning, by name of the set.

    They are the same for all mixes of an experiment. The function reads them from ``folder`` if an
    earlier mix computed them. Otherwise it loads the model and releases it at the end. Losses of a
    model created from a configuration are not stored: it is small, and its weights are random.

    Raises
    ------
    CheckpointError
        For a damaged file.

    Notes
    -----
    Cost: one forward pass over the test sets, once per experiment.
    """
    losses = dict[str, RowLosses]()
    base = None
    for name, table in model.test_tables.items():
        key = json_digest([plain(model.model), model.model.digest(), table.digest])
        stored = Folder(folder / key[:16], key)
        if model.model.path is not None and stored.is_done():
            losses[name] = RowLosses.of(json.loads(stored.read(STORED)))
            continue
        base = model.load() if base is None else base
        losses[name] = row_losses(base, table)
        if model.model.path is not None:
            with stored.lease(patience=60.0):  # other mixes write the same losses
                stored.write(STORED, json.dumps(losses[name].as_dict()).encode())
                stored.commit([STORED], facts={}, done=True)
    del base
    gc.collect()
    return losses
