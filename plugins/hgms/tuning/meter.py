"""The spent share of a budget, and stages that a resumed call does not repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from torch import Tensor

from hgms.config import Budget

Stage = dict[str, Any]
"""The result of a stage: tensors and numbers by name."""


class Meter:
    """Count seconds and lower steps against a budget.

    A budget in seconds limits the time since the start; time of earlier, interrupted calls counts.
    A budget in steps limits the lower steps, where one step moves all replicas. A budget in calls
    limits the gradients of all replicas. A GPU may be a few steps behind the clock: the engines
    wait for it when they judge the replicas.

    >>> meter = Meter(Budget("10 steps"), models=4)
    >>> meter.count(5)
    >>> meter.share
    0.5
    """

    def __init__(self, budget: Budget, models: int, kind: Literal["wall", "cpu"] = "wall") -> None:
        self.budget = budget
        self.models = models
        self.steps = 0
        self.earlier = 0.0
        self._time = time.perf_counter if kind == "wall" else time.process_time
        self._started = self._time()

    @property
    def seconds(self) -> float:
        return self.earlier + self._time() - self._started

    def count(self, steps: int = 1) -> None:
        """Add lower steps."""
        self.steps += steps

    @property
    def share(self) -> float:
        """The spent share of the budget; it may exceed 1."""
        if self.budget.seconds is not None:
            return self.seconds / self.budget.seconds
        if self.budget.outer_steps is not None:
            return self.steps / self.budget.outer_steps
        return self.steps * self.models / (self.budget.oracle_calls or 1)

    def spent(self) -> dict[str, float]:
        return {"seconds": self.seconds, "steps": self.steps}

    def restore(self, spent: Mapping[str, float]) -> None:
        """Continue from the counts of an interrupted call."""
        self.steps = int(spent["steps"])
        self.earlier = max(self.earlier, float(spent["seconds"]) - self._time() + self._started)


class Keeper(Protocol):
    """Stores the results of stages."""

    def load(self, name: str) -> Stage | None: ...

    def save(self, name: str, stage: Stage) -> None: ...


class Stages:
    """Run stages by name; a stage that is stored is loaded instead.

    A stage is a pure function of the problem and of earlier stages, so a resumed call computes the
    same numbers if the budget is in steps.
    """

    def __init__(
        self,
        meter: Meter,
        keeper: Keeper | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self.meter = meter
        self.keeper = keeper
        self.progress = progress
        self.prefix = ""

    def of(self, engine: str) -> Stages:
        """Return the stages of an engine: equal names of two engines are different stages."""
        stages = Stages(self.meter, self.keeper, self.progress)
        stages.prefix = f"{engine} "
        return stages

    def run(self, name: str, function: Callable[[], Stage]) -> Stage:
        if self.progress is not None:
            self.progress(name, min(1.0, self.meter.share))
        name = self.prefix + name
        stored = None if self.keeper is None else self.keeper.load(name)
        if stored is not None:
            self.meter.restore(stored["spent"])
            return stored
        stage = {**function(), "spent": self.meter.spent()}
        stage = {key: _detach(value) for key, value in stage.items()}
        if self.keeper is not None:
            self.keeper.save(name, stage)
        return stage


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
