"""What an outer step takes on R ranks, foretold from one rank and two."""

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
class Parted:
    """Seconds of a step on one rank and on two, each rank with as many threads. With p the share of
    the step that ranks part among them, Amdahl's law says::

        s(R) = s(1) (1 − p + p/R) = s(2) (1 − p + p/R) / (1 − p/2)
            p = 2 (1 − s(2)/s(1)), from 0 to 1

    What two ranks say to each other counts as not parted. Where more ranks say more, or cross a
    network, a step takes longer than this; and more ranks than candidates part rows alone.
    ``error`` is the reason if it could not be measured.

    >>> half = Parted(one=2.0, two=1.5)
    >>> half.share, half.step(2), half.step(8)
    (0.5, 1.5, 1.125)
    >>> Parted(one=1.0, two=1.3).step(64), Parted(one=2.0, two=0.8).step(4)
    (1.3, 0.4)
    """

    one: float = 0.0
    two: float = 0.0
    error: HgmsError | None = None

    @property
    def share(self) -> float:
        """p, the share of a step that is parted; 0 where two ranks are no faster than one."""
        return min(max(2 * (1 - self.two / self.one), 0.0), 1.0) if self.one else 0.0

    def step(self, ranks: int) -> float:
        """Seconds of a step on so many ranks."""
        # from s(2), which is what was measured where p had to be kept within 0 and 1
        p = self.share
        return self.one if ranks == 1 else self.two * (1 - p + p / ranks) / (1 - p / 2)

    def seconds(self, ranks: int, around: float, steps: float, budget: Budget) -> float:
        """Of a run on so many ranks, with ``around`` of it not in steps. A budget in seconds
        stays what it is.
        """
        return around + (budget.seconds if budget.seconds is not None else steps * self.step(ranks))


def threads_of(settings: RunSettings) -> int:
    """The threads that each of two ranks has here.

    Errors: ConfigError where the grid says on how many ranks its runs are, and where two ranks have
        no core each.
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
    """Seconds of a step by the clock after each; the first warms up."""
    after_warm_up = seconds[-1] - seconds[min(1, len(seconds) - 1)]
    return after_warm_up / max(len(seconds) - 2, 1) or seconds[-1]


def measured_on_ranks(config: RunConfig, place: Path, threads: int) -> dict[str, Any]:
    """A step on one rank and on two, carried out alike (nothing is compiled); or why there is
    none.
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
