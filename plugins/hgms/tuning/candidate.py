"""Candidates of a tuning, and the safeguard that selects a candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen
from torch import Tensor


@frozen(eq=False, kw_only=True)
class Candidate:
    """A trained model, or a way to train one, judged on rows that it has not used.

    Attributes:
        name: as it appears in the table of the result.
        is_baseline: whether no hyperparameter was learned by gradient.
        judged: the loss of each judged row.
        u: the hyperparameters ``[m]``.
        w: the parameters ``[d]``; absent if the engine trains the selected candidate later.
        fit: the rows that the final training uses, ``[rows]``.
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


def difference(candidate: Candidate, other: Candidate) -> tuple[float, float]:
    """Return the mean paired difference of the judged losses, and its standard error."""
    rows = candidate.judged - other.judged
    if not math.isfinite(float(rows.mean())):
        return math.inf, math.inf
    spread = float(rows.std()) if len(rows) > 1 else math.inf
    return float(rows.mean()), spread / len(rows) ** 0.5


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, Candidate]:
    """Return the selected candidate, and the best baseline.

    A learned candidate is selected only if its mean gain over the best baseline exceeds the
    standard error of the paired difference; with several such candidates, the largest gain
    minus standard error decides.
    """
    reference = min((item for item in candidates if item.is_baseline), key=lambda item: item.loss)

    def gain(item: Candidate) -> float:
        mean, error = difference(item, reference)
        return -mean - error

    learned = [item for item in candidates if not item.is_baseline and math.isfinite(item.loss)]
    best = max(learned, key=gain, default=reference)
    return (best if best is not reference and gain(best) > 0 else reference), reference


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
        mean, error = (0.0, 0.0) if item is reference else difference(item, reference)
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
