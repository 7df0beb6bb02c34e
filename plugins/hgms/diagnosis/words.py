"""The rows of a diagnosis, and their meaning in plain sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from hgms.config.tables import group_values
from hgms.packages import frame

if TYPE_CHECKING:
    import pandas

BIASED = 0.5
"""Relative shift of the hypergradient above which its bias causes a warning."""
ALIKE = 0.9
"""Cosine with a longer lower run below which the hypergradient depends on the length of the run."""
PRECISE = 0.999
"""Cosine with double precision below which rounding matters."""
SIGMAS = 2.0
"""Number of standard errors by which a choice must be better."""
HUGE = 6.0
"""Power of ten of the number of candidates above which the cost is not affordable."""

Row = Mapping[str, Any]


@frozen(eq=False, repr=False)
class Diagnosis:
    """The measurements of ``run.diagnose``.

    ``rows`` contains one row per diagnosed step. ``warnings`` are sentences on all rows together.
    ``missing_measures`` lists the measures that failed, with the reasons.

    Examples
    --------
    >>> rows = [{"step": 5, "double_cosine": 0.9}, {"step": 10, "double_cosine": 1.0}]
    >>> print(repr(Diagnosis(rows)).partition(":")[0])
    Diagnosis of 2 outer steps
      rounding matters in 1 of 2 diagnosed steps
    """

    rows: list[dict[str, Any]] = field(factory=list)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each problem in some of the rows, with its frequency and size."""
        sentences = []
        learned = [row for row in self.rows if row.get("hypergradient_norm") != 0]
        if self.rows and not learned:
            return ["the hypergradient is zero in every diagnosed step: nothing is learned"]
        for sign in SIGNS:
            known = [value for row in learned if not math.isnan(value := number(row, sign.key))]
            if bad := [value for value in known if sign.wrong(value)]:
                share = f"in {len(bad)} of {len(known)} diagnosed steps"
                sentences.append(sign.text(share, statistics.median(bad)))
        if any(row.get("of") == "result" for row in self.rows):
            sentences.append(
                "this method is no pipeline: its hypergradient, candidates and gain cannot be "
                "looked at, only (θ, x) of its result"
            )
        return sentences

    @property
    def missing_measures(self) -> list[str]:
        """A phrase for each measure that some row lacks, with the last reason.

        Examples
        --------
        >>> Diagnosis(
        ...     [
        ...         {"step": 1, "skipped": {"double": "no task makes the problem in it"}},
        ...         {"step": 2, "skipped": {}},
        ...     ]
        ... ).missing_measures
        ['double precision, in 1 of 2 diagnosed steps: no task makes the problem in it']
        """
        reasons = group_values(
            item for row in self.rows for item in (row.get("skipped") or {}).items()
        )
        return [
            f"{MEASURES.get(key, key)}, in {len(why)} of {len(self.rows)} diagnosed steps: "
            f"{why[-1]}"
            for key, why in reasons.items()
        ]

    def to_frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas data frame, one row per diagnosed step.

        Raises
        ------
        MissingExtra
            Without pandas.
        """
        return frame(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __repr__(self) -> str:
        lines = [
            f"Diagnosis of {len(self.rows)} outer step{'s' * (len(self.rows) != 1)}",
            *self.warnings,
        ]
        return "\n  ".join(lines if len(lines) > 1 or not self.rows else [*lines, "no warning"])


def number(row: Row, key: str) -> float:
    """Return a number of a row; NaN if it is unknown."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


@frozen
class Sign:
    """A sign of a problem: ``wrong`` is true for the number ``key``.

    ``text`` formats the number of steps and the median.
    """

    key: str
    wrong: Callable[[float], bool]
    text: Callable[[str, float], str]


SIGNS = (
    Sign(
        "bias",
        lambda value: value > BIASED,
        lambda steps, value: (
            f"the lower level is not solved {steps}: a Newton step to ∇ₓg = 0 changes the implicit "
            f"hypergradient by {100 * value:.3g} % (median); give the lower level more steps"
        ),
    ),
    Sign(
        "residual",
        lambda value: value > 1,
        lambda steps, value: (
            f"the linear solve went wrong {steps}: its residual is above 1 (median {value:.3g}), "
            "so v = 0 would be better; raise the ridge or take minres"
        ),
    ),
    Sign(
        "curvature",
        lambda value: value <= 0,
        lambda steps, value: (
            f"the linear solve met curvature that is not positive {steps} (median {value:.3g}): "
            "the ridge is too small for this x; raise it"
        ),
    ),
    Sign(
        "longer_cosine",
        lambda value: value < ALIKE,
        lambda steps, value: (
            f"the hypergradient depends on where the lower level stopped {steps}: its cosine "
            f"with that of a lower run four times as long is {value:.2f} (median)"
        ),
    ),
    Sign(
        "double_cosine",
        lambda value: value < PRECISE,
        lambda steps, value: (
            f"rounding matters {steps}: the cosine with double precision is {value:.4f} "
            "(median); use float64"
        ),
    ),
    Sign(
        "choice_ratio",
        lambda value: abs(value) < SIGMAS,
        lambda steps, value: (
            f"the choice of the candidate is within noise {steps}: the best is better than the "
            f"next by {value:.2g} standard errors (median); use more rows to select, or fewer "
            "candidates"
        ),
    ),
    Sign(
        "gain_differentiation",
        lambda value: value <= 0,
        lambda steps, value: (
            f"the outer step did not lower the upper value on other rows {steps} (it rose by "
            f"{-value:.3g}, median): what these steps gained, they gained by selecting"
        ),
    ),
    Sign(
        "log10_candidates_to_halve",
        lambda value: value > HUGE,
        lambda steps, value: (
            f"more candidates do not help {steps}: with so many flat directions, halving the "
            f"selection error takes {power(value)} of them (median), if the paper's bound is tight"
        ),
    ),
)
"""The signs to check, in the order of the warnings."""


MEASURES = {
    "step": "the step",
    "lower_gradient": "∇ₓg",
    "spectrum": "flat directions",
    "bias": "the bias",
    "longer": "a longer lower run",
    "double": "double precision",
    "gain": "gain by selection and differentiation",
    "choice": "the noise of the choice",
    "bound": "the paper's bound",
}
"""Descriptions of the keys of ``skipped``."""


def power(exponent: float) -> str:
    """Format ten to the power ``exponent`` for a table.

    Examples
    --------
    >>> power(2.0), power(45.6)
    ('100', '10^46')
    """
    return f"{10**exponent:.0f}" if exponent < 6 else f"10^{exponent:.0f}"
