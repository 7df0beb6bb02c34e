"""Fit surfaces to finished runs, recommend a mixture, and estimate its uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from hgms.arguments import require
from hgms_core import Key
from hgms_mix.surface.outliers import find_diverged
from hgms_mix.surface.process import Surface, fit
from hgms_mix.surface.recommend import Gap, Recommendation, gap, recommend
from hgms_mix.surface.settings import SurfaceSettings
from hgms_mix.surface.tables import Runs

TARGET = "target"
"""Name of the weighted mean of the metrics that decide."""


@frozen(kw_only=True, eq=False)
class Findings:
    """The results of the ``runs``: ``every`` run except the failed runs ``aside``.

    ``surface`` is the surface of the target, from which ``recommendation`` is computed.
    ``differences`` contains, by metric, the expected loss of the recommended mixture minus the
    expected loss of the prior. ``calibration`` is the root mean square of the target's standardised
    leave-one-out errors. ``covered`` is the share of these errors in a 95 % interval.
    """

    every: Runs
    runs: Runs
    aside: Runs
    prior: np.ndarray
    targets: Mapping[str, float]
    surface: Surface
    recommendation: Recommendation
    differences: Mapping[str, Gap]
    calibration: float
    covered: float

    @property
    def apart(self) -> bool:
        """Whether the recommended mixture is distinguishable from the prior, and better."""
        return self.recommendation.against_prior.high < 0

    @property
    def prior_name(self) -> str:
        return "uniform" if np.ptp(self.prior) < 1e-9 else "the prior"

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as a dictionary for JSON."""
        recommendation = self.recommendation
        surface = self.surface
        sources = self.runs.sources

        def by_source(weights: np.ndarray) -> dict[str, float]:
            return dict(zip(sources, weights.tolist(), strict=True))

        noise = None
        if surface.noise is not None:
            deviations = np.sqrt(
                surface.noise.variance(np.vstack([self.prior, np.eye(len(sources))]))
            )
            noise = {
                "prior": float(deviations[0]),
                **by_source(deviations[1:]),
                "degrees_of_freedom": surface.noise.freedom,
            }
        return {
            "runs": len(self.runs.names),
            "mixtures": len(np.unique(self.runs.mixtures.round(6), axis=0)),
            "set_aside": list(self.aside.names),
            "targets": dict(self.targets),
            "prior": by_source(self.prior),
            "recommended": by_source(recommendation.weights),
            "region": {
                name: bounds.tolist()
                for name, bounds in zip(sources, recommendation.region, strict=True)
            },
            "best_tried": by_source(recommendation.best),
            "told_apart_from_prior": self.apart,
            "difference_to_prior": attrs.asdict(recommendation.against_prior),
            "difference_to_best_tried": attrs.asdict(recommendation.against_best),
            "differences_by_metric": {
                name: attrs.asdict(value) for name, value in self.differences.items()
            },
            "noise": noise,
            "leave_one_out": {
                "root_mean_square": self.calibration,
                "covered": self.covered,
                "widening": surface.widening,
            },
        }


def learn(
    runs: Runs, settings: SurfaceSettings, *, seed: int = 0, rows: Mapping[str, int] | None = None
) -> Findings:
    """Fit surfaces of all metrics, and recommend a mixture.

    The mixture has the best weighted mean of the metrics that decide.

    The function sets aside runs with a non-finite loss, or a loss far above all others
    (:func:`hgms_mix.surface.outliers.find_diverged`). It fits the weighted mean directly. Repeats
    therefore show the noise of the mean for any correlation of the metrics.

    Raises
    ------
    ConfigError
        Too few mixtures, or unknown names.

    Notes
    -----
    Cost: a second or two per metric for some tens of mixtures.
    """
    sources = len(runs.sources)
    deciding = runs.deciding
    require(
        deciding,
        "wrong-metric",
        "the names of all metrics begin with 'test_', but test sets cannot select a mixture",
        place=("runs", "metrics"),
        hint="rename the metric to minimise",
    )
    targets = settings.target_weights(deciding)
    wrong = ~np.isfinite(np.array([*runs.metrics.values()])).all(0)
    kept = runs.only(~wrong)
    if len(kept.names) > sources:
        wrong[~wrong] = find_diverged(kept.mixtures, weighted_losses(kept, targets))
    every, runs, aside = runs, runs.only(~wrong), runs.only(wrong)
    tried = np.unique(runs.mixtures.round(6), axis=0)
    require(
        len(tried) >= sources + 2,
        "too-few-rows",
        f"a surface over {sources} sources requires at least {sources + 2} different mixtures, "
        f"but there are {len(tried)} (runs that are excluded, because a loss is not finite or far "
        f"too high: {len(aside.names)})",
        place=("runs", "mixtures"),
        hint="run more mixtures, or decrease the learning rate",
    )
    counts: Mapping[str, int | None] = {
        name: None if rows is None else rows[name] for name in runs.sources
    }
    prior = settings.prior_over(counts)
    key = Key(seed).fold("surface")
    surface = fit(runs.mixtures, weighted_losses(runs, targets), key.fold("fit", TARGET))
    errors = surface.leave_one_out_errors()
    recommendation = recommend(surface, prior, tried, key.fold("recommend"))
    differences = {}
    for name, losses in runs.metrics.items():
        of_metric = (
            surface if [*targets] == [name] else fit(runs.mixtures, losses, key.fold("fit", name))
        )
        differences[name] = gap(of_metric, recommendation.weights, prior)
    return Findings(
        every=every,
        runs=runs,
        aside=aside,
        prior=prior,
        targets=targets,
        surface=surface,
        recommendation=recommendation,
        differences=differences,
        calibration=float(np.sqrt(np.mean(errors**2))),
        covered=float(np.mean(np.abs(errors / surface.widening) < 1.96)),
    )


def weighted_losses(runs: Runs, targets: Mapping[str, float]) -> np.ndarray:
    """Return the target of each run."""
    return np.asarray(sum(weight * runs.metrics[name] for name, weight in targets.items()))
