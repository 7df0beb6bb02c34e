"""Comparison of the choice of a candidate with noise.

The noise is the noise of the rows that determined the choice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hgms.arguments import require
from hgms_core import Batch, ConfigError, Loss, Tree

BLOCKS = 20
"""Number of batches that the rows are split into, if a loss has no value per row."""
CHUNK = 256
"""Number of rows whose losses are computed together."""


def row_losses(
    loss: Loss, theta: Tree, x: Tree, batch: Batch, size: int
) -> tuple[Tensor, str] | None:
    """Compute the loss of each row, or of each of BLOCKS batches, and return the kind.

    The result is ``None`` if the loss of all rows is the mean of neither.

    Examples
    --------
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
            pass  # vmap does not support this loss: use batches
        if size < 2 * BLOCKS:
            return None
        length = size // BLOCKS  # equal, so the mean over batches is the loss of their rows
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
    loss: Loss, theta: Tree, chosen: Tree, other: Tree, batch: Batch, size: int
) -> dict[str, Any]:
    """Compute the gap between two candidates on the selection rows.

    The result includes the standard error of the gap.

    The standard error is paired row by row::

        choice_gap = mean_i (ℓ_i(other) − ℓ_i(chosen)),      choice_error = sd_i / √rows

    Raises
    ------
    ConfigError
        If the loss has no rows, or is not a mean over rows or batches.
    """
    require(
        size >= 2,
        "no-rows",
        "the upper loss has no rows, so there is no sampling noise",
        place=("f",),
    )
    first, second = (row_losses(loss, theta, x, batch, size) for x in (chosen, other))
    if first is None or second is None or first[1] != second[1]:
        raise ConfigError(
            "not-supported", "the upper loss is not a mean over rows or batches", place=("f",)
        )
    gaps = (second[0] - first[0]).double()
    error = float(gaps.std() / len(gaps) ** 0.5)
    gap = float(gaps.mean())
    return {
        "choice_gap": gap,
        "choice_error": error,
        "choice_ratio": gap / error if error > 0 else None,
        "choice_rows": size,
        "choice_per": first[1],
    }
