"""Batches of fine-tuning: rows in order, padded, and the loss of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

IGNORED = -100
"""The label of a token that is not learned (as in transformers)."""


def completion_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the cross-entropy over the completion tokens (labels other than −100, shifted by one).

    It is the sum divided by ``count``, or the mean. It is computed in float32 for any type of the
    logits.

    Examples
    --------
    >>> labels = torch.tensor([[-100, 1, 0]])
    >>> round(
    ...     float(completion_loss(torch.zeros(1, 3, 4), labels)), 4
    ... )  # log 4 at each of the two tokens
    1.3863
    """
    flat = logits[:, :-1].flatten(0, 1).float()
    target = labels[:, 1:].flatten()
    total = F.cross_entropy(flat, target, ignore_index=IGNORED, reduction="sum")
    return total / (count if count is not None else (target != IGNORED).sum().clamp(min=1))


def collate(rows: Sequence[tuple[Tensor, Tensor]], pad: int) -> dict[str, Tensor]:
    """Pad rows on the right to the longest row.

    Labels are the tokens of the completion, else −100. The first token of a row is never predicted,
    so it is never a label.

    Examples
    --------
    >>> batch = collate(
    ...     [
    ...         (torch.tensor([5, 6, 7]), torch.tensor([False, True, True])),
    ...         (torch.tensor([8, 9]), torch.tensor([False, True])),
    ...     ],
    ...     pad=0,
    ... )
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 7], [8, 9, 0]], [[-100, 6, 7], [-100, 9, -100]], [[1, 1, 1], [1, 1, 0]])
    """
    ids = pad_sequence([tokens.long() for tokens, _ in rows], batch_first=True, padding_value=pad)
    learned = pad_sequence([mask for _, mask in rows], batch_first=True)
    present = pad_sequence([torch.ones_like(mask) for _, mask in rows], batch_first=True)
    labels = ids.where(learned, IGNORED)
    labels[:, 0] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": present.long()}


@define(eq=False)
class ByLength(Sampler[int]):
    """The rows of each optimiser step, sorted by length.

    ``order`` determines the rows of a step (``together`` rows). The sum over a step's rows is the
    same in any order, except for rounding.

    Examples
    --------
    >>> list(ByLength([4, 0, 1, 2, 3], torch.tensor([5, 1, 4, 2, 3]), together=3))
    [1, 4, 0, 3, 2]
    """

    order: Any
    lengths: Tensor
    together: int

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        for rows in torch.tensor(list(self.order), dtype=torch.int64).split(self.together):
            yield from rows[self.lengths[rows].argsort(stable=True)].tolist()
