"""Losses on the test sets: of every row, so that two models can be compared row by row, with bootstrap intervals."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import Key, OutOfMemory, out_of_memory
from hgms_mix.training import IGNORED, collate

RESAMPLES = 10_000


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
    lengths = table.offsets.diff()
    total, tokens = torch.zeros(len(lengths), dtype=torch.float64), torch.zeros(len(lengths), dtype=torch.int64)
    for piece in lengths.argsort(stable=True).split(rows):
        cuts = [slice(int(table.offsets[i]), int(table.offsets[i + 1])) for i in piece.tolist()]
        batch = collate([(table.tokens[cut], table.mask[cut]) for cut in cuts], table.pad_id)
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


def summary(losses: RowLosses, *, seed: int = 0) -> dict[str, Any]:
    """The mean over tokens (Σ loss / Σ tokens) and over examples (the mean of the rows' own means), each with its 95 %
    percentile bootstrap interval over rows.

    >>> flat = RowLosses(total=torch.tensor([2.0, 3.0]).double(), tokens=torch.tensor([2, 3]))
    >>> summary(flat)["token_loss"]
    {'value': 1.0, 'low': 1.0, 'high': 1.0}
    """
    per_row, tokens = losses.per_row, losses.tokens.double()
    total, count, means = _resampled(torch.stack([losses.total, tokens, per_row], 1), seed).unbind(1)
    return {
        "rows": len(per_row),
        "tokens": int(tokens.sum()),
        "token_loss": _interval(float(losses.total.sum() / tokens.sum()), total / count),
        "example_loss": _interval(float(per_row.mean()), means / len(per_row)),
    }


def difference(ours: RowLosses, theirs: RowLosses, *, seed: int = 0) -> dict[str, Any]:
    """Ours − theirs on the same rows, mean over tokens, with its bootstrap interval over rows (a row is drawn for both)."""
    gap, tokens = ours.total - theirs.total, ours.tokens.double()
    total, count = _resampled(torch.stack([gap, tokens], 1), seed).unbind(1)
    return _interval(float(gap.sum() / tokens.sum()), total / count)


def _resampled(columns: Tensor, seed: int) -> Tensor:
    """Sums of the columns over rows drawn with replacement, ``[RESAMPLES, columns]``, some resamples at a time."""
    rows, generator = len(columns), Key(seed).fold("bootstrap").generator()
    step = max(1, 2**22 // rows)
    sums = []
    for first in range(0, RESAMPLES, step):
        index = torch.randint(rows, (min(step, RESAMPLES - first), rows), generator=generator)
        sums.append(columns[index].sum(1))
    return torch.cat(sums)


def _interval(value: float, draws: Tensor) -> dict[str, float]:
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return {"value": value, "low": low, "high": high}
