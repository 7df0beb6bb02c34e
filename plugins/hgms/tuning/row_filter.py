"""The out-of-fold filter: training without the rows that other rows find improbable.

A baseline for weights of rows, and a start for learning them. Each replica has its own filter: its
models also train on the validation rows of the replica, and never on the rows that judge it. If the
budget is too small for this, all replicas share a filter that uses no validation row.
"""

from __future__ import annotations

from collections.abc import Callable

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


def kept_rows(
    problem: TuningProblem, key: Key, solve: Callable[[Tensor], Tensor], *, each: bool = True
) -> Tensor:
    """Return which training rows each replica keeps, ``[K + 1, training rows]``.

    A row is kept if its out-of-fold loss is low. ``solve(fit)`` trains one model per mask of rows.
    Without ``each`` or validation rows, all replicas have one filter, ``[1, training rows]``, whose
    models use no validation row.
    """
    fit, held = fold_masks(problem, key)
    own = each and problem.has_validation
    outer = problem.masks.outer if own else torch.zeros_like(fit[:1])
    w = solve((outer[:, None] + fit).flatten(0, 1))
    losses = [problem.losses_under(models, held) for models in w.split(len(fit))]
    return torch.stack([part <= threshold(part) for part in losses])


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
    """Return ``keep`` as a factor of all rows, ``[..., rows]``; validation rows are kept."""
    kept = torch.ones(*keep.shape[:-1], problem.total).to(problem.w0)
    kept[..., : problem.train_size] = keep.to(kept)
    return kept


def filter_start(problem: TuningProblem, u: Tensor, keep: Tensor) -> Tensor:
    """Return u of each replica, with weights of rows that follow its filter, ``[K + 1, m]``."""
    parts = problem.space.parts(u.expand(len(keep), -1))
    for name, part in parts.items():
        if problem.space.blocks[name].is_per_row:
            parts[name] = torch.where(keep, KEPT, REMOVED).to(part)
    return torch.cat(list(parts.values()), 1)
