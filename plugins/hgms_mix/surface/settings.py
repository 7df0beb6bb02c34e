"""The table `[surface]` of a mix file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from attrs import field

from hgms.arguments import errors_at, require
from hgms_core import component
from hgms_core.validators import at_least, less_than, optional
from hgms_mix.lm import mixture_shares


@final
@component
class SurfaceSettings:
    """Table ``[surface]``: the mixtures to run, and the criterion of the recommendation.

    Parameters
    ----------
    points
        Total number of runs, including repeats (default: the runs of the anchors plus 4 per
        source).
    repeats
        Runs per anchor, each with another seed. The anchors are the prior and, for each source, one
        mixture that consists mostly of this source. The spread of repeats is the noise.
    shrink
        Distance of the anchor of a source from the corner of this source toward the prior, as a
        share of the way.
    prior
        The mixture to compare with: ``uniform``, ``rows`` (in proportion to the rows of the
        sources), or weights by source.
    targets
        Weights of the validation sets (or of the columns of metrics.csv). Their weighted mean
        decides. Empty: equal weights.

    Examples
    --------
    >>> SurfaceSettings(points=30).repeats
    3
    """

    points: int | None = field(default=None, validator=optional(at_least(1)))
    repeats: int = field(default=3, validator=at_least(2))
    shrink: float = field(default=0.1, validator=[at_least(0), less_than(1)])
    prior: Literal["uniform", "rows"] | Mapping[str, float] = field(default="uniform", hash=False)
    targets: Mapping[str, float] = field(factory=dict, hash=False)

    def prior_over(self, sources: Mapping[str, int | None]) -> np.ndarray:
        """Return the prior's weights in the order of ``sources``.

        The values of ``sources`` are the numbers of rows (None: unknown).

        Examples
        --------
        >>> SurfaceSettings(prior={"a": 3.0, "b": 1.0}).prior_over({"a": None, "b": None})
        array([0.75, 0.25])
        """
        if self.prior == "uniform":
            return np.full(len(sources), 1 / len(sources))
        if self.prior == "rows":
            rows = [count for count in sources.values() if count is not None]
            require(
                len(rows) >= len(sources),
                "not-supported",
                'prior="rows" requires the number of rows per source, which a table of ratios '
                "does not contain",
                place=("surface", "prior"),
                hint="set one weight per source",
            )
            return np.array(rows, dtype=float) / sum(rows)
        return np.array(_shares(self.prior, list(sources), "prior"))

    def target_weights(self, names: list[str]) -> dict[str, float]:
        """Return the share of each target in the metrics ``names``, without targets of weight 0.

        The name of a validation set may omit ``validation_``, the prefix of its metric.
        """
        full = {name.removeprefix("validation_"): name for name in names}
        targets = {full.get(name, name): weight for name, weight in self.targets.items()}
        shares = _shares(targets or dict.fromkeys(names, 1.0), names, "targets")
        return {name: share for name, share in zip(names, shares, strict=True) if share > 0}


def _shares(weights: Any, names: Sequence[str], key: str) -> list[float]:
    with errors_at("surface"):
        return mixture_shares(weights, names, key)
