"""Predict the cost of a surface before its runs: number of runs, seconds, tokens."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from hgms_core.components import evolve
from hgms_mix.surface.design import Point
from hgms_mix.surface.runs import DesignRuns, Outcome


@frozen(kw_only=True)
class Cost:
    """The cost of a surface: ``runs`` in total, ``finished`` runs among these, and the cost of the
    remaining runs.

    ``basis`` names the source of the seconds.
    """

    runs: int
    finished: int
    seconds_each: float
    tokens: int
    basis: str

    @property
    def seconds(self) -> float:
        return (self.runs - self.finished) * self.seconds_each

    def as_dict(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        """
        >>> settings = {"seconds_each": 90.0, "tokens": 1_250_000, "basis": "4 finished runs"}
        >>> print(str(Cost(runs=24, finished=4, **settings)).partition(";")[0])
        24 runs, 4 finished
        """
        head = f"{self.runs} runs, {self.finished} finished"
        if self.finished == self.runs:
            return f"{head}: nothing to train"
        each = f"{self.seconds_each:.3g} s each, by {self.basis}"
        return f"{head}; the others take {spell(self.seconds)} ({each}) and {self.tokens:,} tokens"


def cost(runs: DesignRuns, points: Sequence[Point], outcomes: Sequence[Outcome | None]) -> Cost:
    """Return the cost of the unfinished runs.

    Seconds are the median over finished runs. If no run is finished, a short run measures them.

    Cost: for the measurement, five optimiser steps and three evaluations.
    """
    missing = [point for point, outcome in zip(points, outcomes, strict=True) if outcome is None]
    finished = [outcome for outcome in outcomes if outcome is not None]
    timed = [outcome.seconds for outcome in finished if outcome.seconds is not None]
    each = 0.0
    basis = ""
    if timed:
        each = statistics.median(timed)
        basis = f"{len(timed)} finished run{'s' * (len(timed) != 1)}"
    elif missing:
        each = measure_run(runs, missing[0])
        basis = "a short run"
    lengths = runs.tokens()
    sample = runs.config.sample
    tokens = 0.0
    for point in missing:
        weights = dict(zip(runs.sources, point.weights, strict=True))
        tokens += sum(sample.size * weight * lengths[name] for name, weight in weights.items())
    return Cost(
        runs=len(points),
        finished=len(finished),
        seconds_each=each,
        tokens=round(tokens * runs.config.finetune.epochs),
        basis=basis,
    )


def measure_run(runs: DesignRuns, point: Point) -> float:
    """Measure the seconds of a run.

    The time is a run of one optimiser step plus the further steps. A run of three steps gives the
    time per step: half of its additional time. A warm-up run precedes both, because the first run
    imports the packages.
    """
    finetune = runs.config.finetune
    size = runs.config.sample.size
    step = finetune.micro_batch * finetune.accumulation
    steps = math.ceil(size / step) * finetune.epochs
    once = evolve(finetune, epochs=1)
    took = []
    for number, rows in enumerate((step, step, 3 * step)):
        sample = evolve(runs.config.sample, size=min(rows, size))
        config = attrs.evolve(runs.config, sample=sample, finetune=once)
        with tempfile.TemporaryDirectory(prefix="hgms-") as folder:
            short = runs.with_config(config, Path(folder))
            began = time.perf_counter()
            short.run(attrs.evolve(point, seed=number))
            took.append(time.perf_counter() - began)
    more = max(took[2] - took[1], 0.0) / 2
    return took[1] + more * (steps - 1)


def spell(seconds: float) -> str:
    """
    >>> spell(12.3), spell(600.0), spell(7300.0), spell(200_000.0)
    ('12 s', '10 min', '2.0 h', '2.3 days')
    """
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= (600 if unit == "min" else 2 * length):
            return f"{seconds / length:.{0 if unit == 'min' else 1}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
