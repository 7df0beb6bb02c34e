"""Candidates of a tuning, their engines, and the safeguard that selects a candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from hgms.tuning.meter import Meter
from hgms.tuning.problem import TuningProblem

UNSEEN = 2
"""Rows with the largest observed difference that a gain must outweigh."""


@define(eq=False)
class Engine:
    """The fields that both engines share.

    Attributes
    ----------
    centre
        The values u at which learning starts, ``[m]``, or those of each replica, ``[K + 1, m]``.
    """

    problem: TuningProblem
    meter: Meter
    centre: Tensor = field(init=False)

    @centre.default
    def _start(self) -> Tensor:
        return self.problem.space.start


@frozen(eq=False, kw_only=True)
class Candidate:
    """A trained model, or a way to train one, judged on rows that it has not used.

    Attributes
    ----------
    name
        As it appears in the table of the result.
    is_baseline
        Whether no hyperparameter was learned.
    judged
        The loss of each judged row.
    u
        The hyperparameters ``[m]``.
    w
        The parameters ``[d]``, or the start of the final training.
    fit
        The rows that the final training uses, ``[rows]``.
    """

    name: str
    is_baseline: bool
    judged: Tensor
    u: Tensor
    w: Tensor | None = None
    fit: Tensor | None = None

    @property
    def loss(self) -> float:
        mean = float(self.judged.mean())
        return mean if math.isfinite(mean) else math.inf


def difference(judged: Tensor, others: Tensor) -> tuple[float, float]:
    """Return the mean paired difference of the losses of the same rows, and its standard error."""
    rows = judged - others
    if not math.isfinite(float(rows.mean())):
        return math.inf, math.inf
    spread = float(rows.std()) if len(rows) > 1 else math.inf
    return float(rows.mean()), spread / len(rows) ** 0.5


def scores(judged: Tensor, fold: Tensor) -> Tensor:
    """Return the mean loss of the rows outside each fold, then of all rows, ``[K + 1]``.

    A loss that is not finite counts as infinite.

    Examples
    --------
    >>> scores(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 1]))
    tensor([6.0000, 1.5000, 3.0000])
    """
    total = judged.double().sum()
    folds = int(fold.max()) + 1
    sums = torch.zeros(folds, dtype=torch.float64, device=judged.device)
    sums = sums.index_add(0, fold, judged.double())
    counts = torch.bincount(fold, minlength=folds)
    means = torch.cat([(total - sums) / (len(fold) - counts), (total / len(fold))[None]])
    return torch.nan_to_num(means, math.inf, math.inf, math.inf).to(judged)


def sure_gain(candidate: Candidate, reference: Candidate) -> float:
    """Return the mean gain minus its standard error, and minus the share of unseen rows.

    A confident model can be wrong on a rare row that is not judged. Therefore, the gain must
    remain if ``UNSEEN`` more rows have the largest observed difference as a loss.
    """
    mean, error = difference(candidate.judged, reference.judged)
    largest = float((candidate.judged - reference.judged).abs().max())
    return -mean - error - UNSEEN * largest / len(reference.judged)


def cross_fitted(learned: Sequence[Candidate], reference: Candidate, fold: Tensor) -> Tensor:
    """Return the judged losses of selecting a learned candidate, by cross-fitting.

    The rows of fold k are judged under the candidate that the other folds select.
    """
    judged = torch.empty_like(reference.judged)
    for k in range(int(fold.max()) + 1):
        others = fold != k
        base = evolve(reference, judged=reference.judged[others])
        best = max(
            learned, key=lambda item: sure_gain(evolve(item, judged=item.judged[others]), base)
        )
        judged[~others] = best.judged[~others]
    return judged


def choose(candidates: Sequence[Candidate], fold: Tensor) -> tuple[Candidate, Candidate]:
    """Return the selected candidate, and the best baseline.

    The learned candidate with the largest :func:`sure_gain` over the best baseline is selected. The
    selection itself is judged by cross-fitting. A learned candidate is returned only if its own
    gain and the gain of the selection are sure.
    """
    reference = min((item for item in candidates if item.is_baseline), key=lambda item: item.loss)
    learned = [item for item in candidates if not item.is_baseline and math.isfinite(item.loss)]
    if not learned:
        return reference, reference
    best = max(learned, key=lambda item: sure_gain(item, reference))
    selection = evolve(best, judged=cross_fitted(learned, reference, fold))
    is_better = sure_gain(best, reference) > 0 and sure_gain(selection, reference) > 0
    return (best if is_better else reference), reference


@frozen(eq=False, kw_only=True)
class Judgement:
    """One candidate in the table of a result.

    ``gain`` is the mean judged loss of the best baseline minus the loss of the candidate, and
    ``error`` its standard error over rows. ``test_loss`` is reported only.
    """

    name: str
    is_baseline: bool
    loss: float
    gain: float
    error: float
    test_loss: float | None = None


def judgements(
    candidates: list[Candidate], reference: Candidate, tests: Mapping[str, float]
) -> tuple[Judgement, ...]:
    """Return the rows of the table, the lowest loss first, baselines first."""
    rows = []
    for item in candidates:
        mean, error = (0.0, 0.0) if item is reference else difference(item.judged, reference.judged)
        rows.append(
            Judgement(
                name=item.name,
                is_baseline=item.is_baseline,
                loss=item.loss,
                gain=-mean,
                error=error,
                test_loss=tests.get(item.name),
            )
        )
    return tuple(sorted(rows, key=lambda row: (not row.is_baseline, row.loss)))
