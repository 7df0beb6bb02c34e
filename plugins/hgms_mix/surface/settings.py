"""The table `[surface]` of a mix file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast, final

import attrs
import numpy as np
from attrs import field

from hgms_core import ConfigError, component
from hgms_core.errors import unknown_name
from hgms_core.validators import at_least, less_than, not_negative, optional


def _prior(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, Mapping):
        _weighing(attribute.name, value)


def _targets(_: object, attribute: attrs.Attribute[Any], value: Mapping[str, float]) -> None:
    if value:
        _weighing(attribute.name, value)


def _weighing(name: str, weights: Mapping[str, float]) -> None:
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()) or not any(
        weights.values()
    ):
        raise ConfigError(
            "wrong-value",
            f"{name}={dict(weights)} must contain finite weights of at least 0, and one above 0",
            place=(name,),
        )


@final
@component
class SurfaceSettings:
    """Table ``[surface]``: the mixtures to run, and the criterion of the recommendation.

    Arguments:
        points: total number of runs, including repeats (default: the runs of the anchors plus 4
            per source).
        repeats: runs per anchor, each with another seed. The anchors are the prior and, for each
            source, one mixture that consists mostly of this source. The spread of repeats is the
            noise.
        shrink: distance of the anchor of a source from the corner of this source toward the prior,
            as a share of the way.
        prior: the mixture to compare with: ``uniform``, ``rows`` (in proportion to the rows of the
            sources), or weights by source.
        targets: weights of the validation sets (or of the columns of metrics.csv). Their weighted
            mean decides. Empty: equal weights.
        caution: the recommended mixture minimises mean + caution · standard deviation of the
            surface. 0: the mean; 1: of two mixtures with equal means, the mixture with the smaller
            uncertainty.

    >>> SurfaceSettings(points=30).repeats
    3
    """

    points: int | None = field(default=None, validator=optional(at_least(1)))
    repeats: int = field(default=3, validator=at_least(2))
    shrink: float = field(default=0.1, validator=[at_least(0), less_than(1)])
    prior: Literal["uniform", "rows"] | Mapping[str, float] = field(
        default="uniform", validator=_prior, hash=False
    )
    targets: Mapping[str, float] = field(factory=dict, validator=_targets, hash=False)
    caution: float = field(default=0.0, validator=not_negative)

    def prior_over(self, sources: Mapping[str, int | None]) -> np.ndarray:
        """Return the prior's weights in the order of ``sources``.

        The values of ``sources`` are the numbers of rows (None: unknown).

        >>> SurfaceSettings(prior={"a": 3.0, "b": 1.0}).prior_over({"a": None, "b": None})
        array([0.75, 0.25])
        """
        if self.prior == "uniform":
            return np.full(len(sources), 1 / len(sources))
        if self.prior == "rows":
            rows = [count for count in sources.values() if count is not None]
            if len(rows) < len(sources):
                raise ConfigError(
                    "not-supported",
                    'prior="rows" requires the number of rows per source, which a table of ratios '
                    "does not contain",
                    place=("surface", "prior"),
                    hint="set one weight per source",
                )
            weights = np.array(rows, dtype=float)
        else:
            named = _check_known(
                cast("Mapping[str, float]", self.prior), sources, "prior", "source"
            )
            weights = np.array([named.get(name, 0.0) for name in sources], dtype=float)
        return weights / weights.sum()

    def target_weights(self, names: list[str]) -> dict[str, float]:
        """Return the share of each target in the metrics ``names``, without targets of weight 0.

        The name of a validation set may omit ``validation_``, the prefix of its metric.
        """
        full = {name.removeprefix("validation_"): name for name in names}
        targets = {full.get(name, name): weight for name, weight in self.targets.items()}
        weights = (
            _check_known(targets, names, "targets", "metric")
            if targets
            else dict.fromkeys(names, 1.0)
        )
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight > 0}


def _check_known(weights: Mapping[str, float], names: Any, key: str, kind: str) -> dict[str, float]:
    for name in weights:
        if name not in names:
            raise unknown_name(kind, name, names, ("surface", key, name))
    return dict(weights)
