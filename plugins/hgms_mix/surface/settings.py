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
    """Table ``[surface]``: which mixtures are tried, and what decides among them.

    Arguments:
        points: runs in all, repeats counted; None: the anchors' and 4 for each source.
        repeats: runs, each with another seed, of each anchor: the prior, and one mixture near each
            source alone. Their spread is the noise.
        shrink: how far the anchor of a source is drawn from "that source alone" to the prior (share
            of the way).
        prior: the mixture that others are compared with: ``uniform``, ``rows`` (in proportion to
            the sources' rows), or weights by source.
        targets: weights of the validation sets (or of the columns of metrics.csv), whose mean
            decides; empty: all alike.
        caution: the recommended mixture minimises mean + caution · standard deviation of the
            surface. 0: the mean; 1: of two mixtures with equal means the one that is better known.

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
        """The prior's weights in the order of ``sources``, whose values are their numbers of rows
        (None: not known).

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
            named = _named(cast("Mapping[str, float]", self.prior), sources, "prior", "source")
            weights = np.array([named.get(name, 0.0) for name in sources], dtype=float)
        return weights / weights.sum()

    def target_weights(self, names: list[str]) -> dict[str, float]:
        """The share of each target, of which there are ``names``; those of no weight are left out.
        A validation set may be named without ``validation_``, which its metric begins with."""
        full = {name.removeprefix("validation_"): name for name in names}
        targets = {full.get(name, name): weight for name, weight in self.targets.items()}
        weights = (
            _named(targets, names, "targets", "metric") if targets else dict.fromkeys(names, 1.0)
        )
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight > 0}


def _named(weights: Mapping[str, float], names: Any, key: str, kind: str) -> dict[str, float]:
    for name in weights:
        if name not in names:
            raise unknown_name(kind, name, names, ("surface", key, name))
    return dict(weights)
