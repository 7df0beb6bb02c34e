"""The out-of-fold filter: training without the rows that other rows find improbable.

A baseline for weights of rows, and a start for learning them. It uses no validation row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hgms.tuning.problem import TuningProblem
from hgms_core import Key

KEPT = 0.0
REMOVED = -6.0
"""u of kept and removed rows: the weights 2σ(u) are 1 and 0.005."""


def fold_masks(problem: TuningProblem, key: Key) -> tuple[Tensor, Tensor]:
    """Return the training rows that each model trains on, and those that it is judged on.

    Both are ``[K, rows]``; each training row is judged once.
    """
    folds = problem.masks.folds
    size = problem.train_size
    fold = torch.full((problem.total,), -1)
    fold[:size] = torch.randperm(size, generator=key.generator()) % folds
    held = torch.stack([(fold == k).to(problem.w0) for k in range(folds)])
    return (fold >= 0).to(problem.w0) - held, held


def kept_rows(problem: TuningProblem, w: Tensor, held: Tensor) -> Tensor:
    """Return a mask of the training rows with a low out-of-fold loss."""
    losses = problem.losses_under(w, held)
    return losses <= threshold(losses)


def threshold(losses: Tensor) -> float:
    """Return the loss that separates low and high losses best (Otsu's method, log scale).

    The variance of the logarithms within the two groups is minimal.

    Examples
    --------
    >>> threshold(torch.tensor([0.1, 0.12, 0.09, 3.0, 3.5])) < 3.0
    True
    """
    ordered = losses.clamp_min(1e-6).log().sort().values.double()
    count = len(ordered)
    sizes = torch.arange(1, count, dtype=torch.float64)
    sums = ordered.cumsum(0)
    low = sums[:-1] / sizes
    high = (sums[-1] - sums[:-1]) / (count - sizes)
    between = sizes * (count - sizes) * (low - high).square()
    split = int(between.argmax())
    return float(ordered[split].exp()) * (1 + 1e-6)


def row_mask(problem: TuningProblem, keep: Tensor) -> Tensor:
    """Return ``keep`` as a factor of all rows, ``[rows]``; validation rows are kept."""
    kept = torch.ones(problem.total).to(problem.w0)
    kept[: problem.train_size] = keep.to(kept)
    return kept


def filter_start(problem: TuningProblem, u: Tensor, keep: Tensor) -> Tensor:
    """Return u with weights of rows that follow the filter."""
    parts = problem.space.parts(u)
    for name, part in parts.items():
        if problem.space.blocks[name].is_per_row:
            parts[name] = torch.where(keep, KEPT, REMOVED).to(part)
    return torch.cat(list(parts.values()))
