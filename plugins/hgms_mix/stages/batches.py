"""Rows as batches, and the loss over their completion tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100
"""The label of a token that is not learned (as in transformers)."""


def completion_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Return the cross-entropy over the completion tokens (labels other than −100, shifted by one).

    It is the sum divided by ``count``, or the mean. It is computed in float32 for any type of the
    logits.

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
