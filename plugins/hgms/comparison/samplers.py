"""Samplers of the settings that a pilot sweep tries.

- ``grid`` takes the points of the lists in a seeded order.
- ``random`` draws new values for every trial.
- ``tpe`` is Optuna's tree-structured Parzen estimator with a seed.

Each is a function of the earlier trials, so an interrupted sweep resumes with the same trials.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from hgms.comparison.space import Choices, Dimension, Space
from hgms.packages import optional_module
from hgms_core import Key

Values = dict[str, Any]


@define
class Trial:
    """One setting of a method. Its loss is the mean validation loss over the pilot seeds, or
    infinite if a run failed.
    """

    number: int
    values: Values
    losses: dict[int, float | None] = field(factory=dict)

    @property
    def loss(self) -> float:
        known = [math.inf if loss is None else loss for loss in self.losses.values()]
        return (
            math.fsum(known) / len(known) if known and all(map(math.isfinite, known)) else math.inf
        )


def from_grid(space: Space, trials: Sequence[Trial], key: Key) -> Values:
    """Return the next point of the lists in a seeded order, without the method's own values."""
    dimensions = [dimension.values or () for dimension in space.values()]
    grid = [dict(zip(space, point, strict=True)) for point in itertools.product(*dimensions)]
    points = [point for point in grid if point != trials[0].values]
    order = torch.randperm(len(points), generator=key.generator())
    return points[int(order[len(trials) - 1])]


def at_random(space: Space, trials: Sequence[Trial], key: Key) -> Values:
    """Draw new values for each trial; values that were already tried are redrawn."""
    known = [trial.values for trial in trials]
    values: Values = {}
    for attempt in range(1000):
        shares = torch.rand(
            len(space),
            generator=key.fold(len(trials)).fold(attempt).generator(),
            dtype=torch.float64,
        ).tolist()
        values = {
            name: dimension.at(share)
            for (name, dimension), share in zip(space.items(), shares, strict=True)
        }
        if values not in known:
            break
    return values


def by_tpe(space: Space, trials: Sequence[Trial], key: Key) -> Values:
    """Draw with Optuna's TPE, fitted to all trials so far.

    A failed trial counts as worse than the worst loss.
    """
    optuna = import_optuna()
    distributions = {}
    for name, dimension in space.items():
        if isinstance(dimension, Choices):
            distributions[name] = optuna.distributions.CategoricalDistribution(
                range(len(dimension.values))
            )
        elif dimension.whole:
            distributions[name] = optuna.distributions.IntDistribution(
                dimension.low, dimension.high, log=dimension.log
            )
        else:
            distributions[name] = optuna.distributions.FloatDistribution(
                dimension.low, dimension.high, log=dimension.log
            )
    worst = max((trial.loss for trial in trials if math.isfinite(trial.loss)), default=0.0) + 1.0
    seed = int(torch.randint(2**31, (), generator=key.fold(len(trials)).generator()))
    # Optuna's default of ten random trials would leave no trial for the model in a short sweep.
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=sampler)
        for trial in trials:
            parameters = {
                name: _parameter(space[name], value) for name, value in trial.values.items()
            }
            if any(value is None for value in parameters.values()):
                continue  # the method's own settings may be outside of the space
            loss = trial.loss if math.isfinite(trial.loss) else worst
            study.add_trial(
                optuna.trial.create_trial(
                    params=parameters, distributions=distributions, value=loss
                )
            )
        drawn = study.ask(distributions).params
    finally:
        optuna.logging.set_verbosity(level)
    return {
        name: dimension.values[drawn[name]] if isinstance(dimension, Choices) else drawn[name]
        for name, dimension in space.items()
    }


def _parameter(dimension: Dimension, value: Any) -> Any:
    """Convert a value to Optuna's form; ``None`` if the dimension does not contain it."""
    if isinstance(dimension, Choices):
        return dimension.values.index(value) if value in dimension.values else None
    return (
        value
        if isinstance(value, (int, float)) and dimension.low <= value <= dimension.high
        else None
    )


def import_optuna() -> Any:
    return optional_module(
        "optuna",
        "sampler='tpe'",
        "optuna",
        place=("sweep", "sampler"),
        hint='or set sampler = "random"',
    )


SAMPLERS: Mapping[str, Callable[[Space, Sequence[Trial], Key], Values]] = {
    "grid": from_grid,
    "random": at_random,
    "tpe": by_tpe,
}
"""Samplers by name. Each returns the values of the next trial from the earlier trials; the first
trial has the method's own values.
"""
