"""Whether the choice of a candidate is more than the noise of the rows it was chosen on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hgms_core import Batch, ConfigError, Data, Loss, Tree

BLOCKS = 20
"""Batches that the rows are split into where a loss has no value of a single row."""
CHUNK = 256
"""Rows of a loss that are looked at together."""


def row_losses(
    loss: Loss, theta: Tree, x: Tree, batch: Batch, size: int
) -> tuple[Tensor, str] | None:
    """The loss of each row alone, or of each of BLOCKS batches, and which of them; None where the
    loss of all rows is not the mean of either.

    >>> square = lambda theta, x, batch: (x["x"] * batch["a"]).square().mean()
    >>> row_losses(square, {}, {"x": torch.tensor(2.0)}, {"a": torch.tensor([1.0, 3.0])}, 2)
    (tensor([ 4., 36.]), 'row')
    """
    with torch.no_grad():
        whole = float(loss(theta, x, batch))
        try:
            single = torch.func.vmap(
                lambda row: loss(theta, x, {name: leaf[None] for name, leaf in row.items()}),
                chunk_size=CHUNK,
            )
            values = single(batch).reshape(-1)
            if math.isclose(float(values.double().mean()), whole, rel_tol=1e-3, abs_tol=1e-6):
                return values, "row"
        except (RuntimeError, ValueError, TypeError, IndexError):
            pass  # a loss that vmap cannot carry out: by batches
        if size < 2 * BLOCKS:
            return None
        length = size // BLOCKS  # equal ones, so that their mean is the loss of the rows in them
        parts = [
            {name: leaf[i * length : (i + 1) * length] for name, leaf in batch.items()}
            for i in range(BLOCKS)
        ]
        values = torch.stack([loss(theta, x, part).reshape(()) for part in parts])
        together = float(
            loss(theta, x, {name: leaf[: BLOCKS * length] for name, leaf in batch.items()})
        )
        alike = math.isclose(float(values.double().mean()), together, rel_tol=1e-3, abs_tol=1e-6)
        return (values, "batch") if alike else None


def choice(
    loss: Loss, theta: Tree, chosen: Tree, other: Tree, data: Data, batch: Batch, size: int
) -> dict[str, Any]:
    """The gap between two candidates on the rows that choose, against the standard error of that
    gap, paired row by row::

        choice_gap = mean_i (ℓ_i(other) − ℓ_i(chosen)),      choice_error = sd_i / √rows

    Errors: ConfigError if the loss has no rows, or is not a mean over rows or batches.
    """
    if size < 2:
        raise ConfigError(
            "no-rows", "the upper loss has no rows, so there is no sampling noise", place=("f",)
        )
    first, second = (row_losses(loss, theta, x, batch, size) for x in (chosen, other))
    if first is None or second is None or first[1] != second[1]:
        raise ConfigError(
            "not-supported", "the upper loss is not a mean over rows or batches", place=("f",)
        )
    gaps = (second[0] - first[0]).double()
    error = float(gaps.std() / len(gaps) ** 0.5)
    gap = float(gaps.mean())
    ratio = gap / error if error > 0 else None
    return {
        "choice_gap": gap,
        "choice_error": error,
        "choice_ratio": ratio,
        "choice_rows": size,
        "choice_per": first[1],
    }
