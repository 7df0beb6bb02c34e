"""Predict the time of an outer step on R ranks from measurements on one and two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from hgms.config import Budget
from hgms.executors import cores, pack_error
from hgms.runs import RunConfig, RunSettings, run_config
from hgms_core import ConfigError, HgmsError
from hgms_core.components import evolve


@frozen(kw_only=True)
class RankTimes:
    """Seconds of a step on one rank and on two; each rank has equally many threads.

    With p the share of the step that is split across ranks, Amdahl's law states::

        s(R) = s(1) (1 − p + p/R) = s(2) (1 − p + p/R) / (1 − p/2)
            p = 2 (1 − s(2)/s(1)), from 0 to 1

    Communication between two ranks counts as not parallel. A step takes longer than predicted if
    more ranks communicate more, or communicate over a network. With more ranks than candidates,
    only rows are split. ``error`` is the reason if it could not be measured.

    >>> half = RankTimes(one=2.0, two=1.5)
    >>> half.share, half.step(2), half.step(8)
    (0.5, 1.5, 1.125)
    >>> RankTimes(one=1.0, two=1.3).step(64), RankTimes(one=2.0, two=0.8).step(4)
    (1.3, 0.4)
    """

    one: float = 0.0
    two: float = 0.0
    error: HgmsError | None = None

    @property
    def share(self) -> float:
        """p, the share of a step that is split across ranks; 0 if two ranks are not faster than
        one.
        """
        return min(max(2 * (1 - self.two / self.one), 0.0), 1.0) if self.one else 0.0

    def step(self, ranks: int) -> float:
        """Seconds of a step on this number of ranks."""
        # use s(2), the measured value, in case p was clipped to [0, 1]
        p = self.share
        return self.one if ranks == 1 else self.two * (1 - p + p / ranks) / (1 - p / 2)

    def seconds(self, ranks: int, around: float, steps: float, budget: Budget) -> float:
        """Seconds of a run on this number of ranks, ``around`` of them outside of steps. A budget
        in seconds does not change.
        """
        return around + (budget.seconds if budget.seconds is not None else steps * self.step(ranks))


def threads_of(settings: RunSettings) -> int:
    """Return the number of threads per rank for two ranks on this machine.

    Errors: ConfigError if the grid sets the number of ranks, or if two ranks do not have one core
    each.
    """
    if settings.ranks != 1:
        raise ConfigError(
            "conflicting-options",
            f"ranks={settings.ranks} must be 1 to measure the time on several ranks",
            place=("run", "ranks"),
            hint="add --set run.ranks=1",
        )
    threads = settings.threads or max(1, cores() // 2)
    if settings.device == "cpu" and 2 * threads > cores():
        raise ConfigError(
            "too-few-cores",
            f"two ranks with {threads} thread{'s' * (threads > 1)} each require {2 * threads} "
            f"cores, but this process can use {cores()}",
            place=("run", "threads"),
            hint="omit --ranks, or decrease run.threads",
        )
    return threads


def step_of(seconds: Sequence[float]) -> float:
    """Return the seconds per step from the clock after each step; the first step warms up."""
    after_warm_up = seconds[-1] - seconds[min(1, len(seconds) - 1)]
    return after_warm_up / max(len(seconds) - 2, 1) or seconds[-1]


def measured_on_ranks(config: RunConfig, place: Path, threads: int) -> dict[str, Any]:
    """Measure a step on one rank and on two with the same settings (no compilation). Return the
    error if that fails.
    """
    step = {}
    for ranks in (1, 2):
        settings = evolve(config.run, ranks=ranks, threads=threads, compile=False, matmul="exact")
        try:
            result = run_config(evolve(config, run=settings), path=place / f"ranks-{ranks}")
        except HgmsError as error:
            return {"error": pack_error(error)}
        step[ranks] = step_of([float(row["seconds"]) for row in result.records])
    return {"one": step[1], "two": step[2]}
